"""The reading path stays short: pretrain.py and every file that a training step of TP2 × PP2 × DP2 executes.

Lines of code are counted, without blank lines, comments and docstrings; `-s` prints them by file. Paths are relative to
the root; one that ends in / is a directory. An entry whose file no step executes fails the test.
"""

from __future__ import annotations

import pytest

from tests.structure import tracing
from tests.structure.sources import ROOT
from tests.support.configs import SINGLE, config_of, write_tokens

LONGEST_PATH, LARGEST_VOCABULARY = 3450, 600
ENTRY = ("pretrain.py",)
EXCEPTIONS = {
    "kernels/": "operations in plain PyTorch and in Triton: one can take each as the formula in its docstring",
    "megalite/config/sections/": "the options, which --help explains one by one",
    "megalite/system/rng.py": "random numbers by key: callers rely on its first line only",
    "megalite/system/shared_memory.py": "a transport of small messages beneath the collectives, in place of TCP",
    "megalite/system/pinned_memory.py": "reads values of a GPU later; on a CPU it returns them",
    "megalite/system/activity.py": "tells other threads where a rank is; without it a step computes the same",
    "megalite/training/fault_injection.py": "injects faults; does nothing in a run without --faults",
}
VOCABULARY = (  # the terms of the others: which ranks communicate, what a rank holds, the parts of a schedule
    "megalite/mesh/layout.py",
    "megalite/mesh/mesh.py",
    "megalite/parallel/spec.py",
    "megalite/parallel/pipeline/schedule.py",
    "megalite/parallel/pipeline/send_recv_actions.py",
)
CASE = {
    **{**SINGLE, "tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "microbatches": 4},
    **{"tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 4, "masked": False, "dropout": 0.0},
}


def excepted(file: str) -> bool:
    return any(file == entry or (entry.endswith("/") and file.startswith(entry)) for entry in EXCEPTIONS)


@pytest.fixture(scope="module")
def executed(ranks, tmp_path_factory) -> set[str]:
    config = config_of(CASE, write_tokens(tmp_path_factory.mktemp("tokens"), CASE["vocab_size"]))
    return set().union(*ranks.run(8, tracing.executed, config))


def table(title: str, files: list[str]) -> tuple[int, str]:
    """The number of lines of code of some files, and a table of them by file, the longest first."""
    lines = {file: tracing.code_lines((ROOT / file).read_text()) for file in files}
    rows = [f"{count:6,}  {file}" for file, count in sorted(lines.items(), key=lambda item: -item[1])]
    total = sum(lines.values())
    return total, "\n".join([f"{title}: {total:,} lines of code in {len(files)} files", *rows])


def test_a_step_can_be_read(executed):
    path = sorted(file for file in executed | set(ENTRY) if file not in VOCABULARY and not excepted(file))
    length, listed = table("reading path", path)
    words, vocabulary = table("its vocabulary", list(VOCABULARY))
    _, others = table("exceptions", sorted(filter(excepted, executed)))
    print("", listed, vocabulary, others, sep="\n")
    assert length <= LONGEST_PATH, listed
    assert words <= LARGEST_VOCABULARY, vocabulary


def test_a_step_is_traced_whole_and_every_exception_is_part_of_it(executed):
    assert len(executed) > len(EXCEPTIONS) + len(VOCABULARY) + 10, executed
    assert [entry for entry in EXCEPTIONS if not any(file.startswith(entry) for file in executed)] == []
    assert [file for file in (*ENTRY, *VOCABULARY) if not (ROOT / file).is_file()] == []


def test_lines_of_code_are_counted_without_comments_docstrings_and_blanks():
    source = '''"""A docstring
of two lines."""

# a comment
VALUE = (  # one
    1,

    # a comment inside
    2,
)
"""An attribute's docstring."""
TEXT = """two

lines, and a blank one"""


def function():
    """Its docstring."""
    return VALUE
'''
    assert tracing.code_lines(source) == 4 + 2 + 2
