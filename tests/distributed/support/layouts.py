"""The space of layouts and models over which a run must equal one process, and a pairwise table of it.

A case is a dict of option values, with the number of layers that follows from them. `pairwise()` gives a small list of legal cases in which
every legal pair of option values occurs (table.txt, which covering.py searches); `every_case()` walks the whole space.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

from megalite.parallel.pipeline.generator import chunks_of

Case = dict[str, Any]

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 3, 4),
    "schedule": ("1f1b", "gpipe", "interleaved-2", "interleaved-3", "zb-h1", "zb-h2", "zb-v", "v-half"),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "cpu", "disk"),
    "sequence_parallel": (False, True),
    "microbatches": (1, 2, 8),
    "recompute": ("none", "selective", "full", "every-2"),
    "tied": (False, True),
    "kv_heads": (4, 1),
    "vocab_size": (96, 101),
    "uneven": (False, True),  # one layer more than stages
    "masked": (False, True),
    "dropout": (0.0, 0.1),
    "precision": ("fp64", "fp32"),
}
TABLE = Path(__file__).with_name("table.txt")
MAX_WORLD = 8


def schedule_options(schedule: str) -> tuple[str, int | None]:
    """parallel.schedule and parallel.virtual_stages: `interleaved-3` is interleaved with three stages per rank."""
    name, _, chunks = schedule.partition("interleaved-")
    return ("interleaved", int(chunks)) if chunks else (name, None)


def stages(case: Case) -> int:
    """The number of pipeline stages over all ranks."""
    return int(case["pp"] * chunks_of(*schedule_options(case["schedule"])))


def with_layers(case: Case) -> Case:
    """The case with as many layers as its stages need, and no more: every layer of every case is paid for in time."""
    fewest = 3 if case["recompute"] == "every-2" else 2  # a group of two, and one that is cut short
    return {**case, "layers": max(stages(case), fewest) + case["uneven"]}


def is_legal(case: Case) -> bool:
    """Whether a (possibly partial) case can run here: at most 8 ranks, sequence parallelism only with tp."""
    sequence_parallel = case.get("sequence_parallel", False)
    tp = case.get("tp", 2 if sequence_parallel else 1)
    return tp * case.get("pp", 1) * case.get("dp", 1) <= MAX_WORLD and not (sequence_parallel and tp == 1)


def world(case: Case) -> int:
    return int(case["tp"] * case["pp"] * case["dp"] * case.get("cp", 1))


def global_batch(case: Case) -> int:
    return 24 if case["dp"] == 3 else 32


def micro_batch(case: Case) -> int:
    return global_batch(case) // (case["dp"] * case["microbatches"])


def name(case: Case) -> str:
    flags = [f"tp{case['tp']}", f"pp{case['pp']}", f"dp{case['dp']}", case["schedule"], f"zero{case['zero']}", f"m{case['microbatches']}"]
    flags += [case["offload"]] if case["offload"] != "none" else []
    flags += ["sp"] if case["sequence_parallel"] else []
    flags += [case["recompute"], f"kv{case['kv_heads']}", f"v{case['vocab_size']}", f"l{case['layers']}"]
    return "-".join([*flags, *(flag for flag in ("tied", "masked", "dropout") if case[flag]), case["precision"]])


def every_case() -> Iterator[Case]:
    for values in product(*OPTIONS.values()):
        case = dict(zip(OPTIONS, values, strict=True))
        if is_legal(case) and global_batch(case) % (case["dp"] * case["microbatches"]) == 0:
            yield with_layers(case)


NAMED = {  # always in the table, under these names
    "tp": 2,
    "pp": 2,
    "dp": 2,
    "schedule": "1f1b",
    "zero": 1,
    "offload": "none",
    "sequence_parallel": True,
    "microbatches": 2,
    "recompute": "none",
    "tied": True,
    "kv_heads": 1,
    "vocab_size": 101,
    "uneven": True,
    "masked": True,
    "dropout": 0.1,
    "precision": "fp64",
}


def legal_pairs() -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    pairs = set()
    for one, other in combinations(OPTIONS, 2):
        for a, b in product(OPTIONS[one], OPTIONS[other]):
            if is_legal({one: a, other: b}):
                pairs.add(((one, a), (other, b)))
    return pairs


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations([(option, case[option]) for option in OPTIONS], 2))


def pairwise() -> list[Case]:
    """The table that `python -m tests.distributed.support.covering` has written: every legal pair, for few seconds."""
    header, *rows = (line.split() for line in TABLE.read_text().splitlines())
    values = {option: {str(value): value for value in OPTIONS[option]} for option in header}
    cases = [{option: values[option][word] for option, word in zip(header, row, strict=True)} for row in rows]
    return [with_layers({**{option: values[0] for option, values in OPTIONS.items()}, **case}) for case in cases]
