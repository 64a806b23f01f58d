"""docs/huggingface.md lists the tested shapes of each family, and CONTRIBUTING.md shows one whole family."""

from __future__ import annotations

import re
from collections import defaultdict

from megalite.families.model_config import families
from tests.generation.test_language_model import NAMES as GENERATED
from tests.huggingface.hf_models import CASES, LAYOUT_CASES, model_type
from tests.huggingface.test_gradients import NAMES as WITH_GRADIENTS
from tests.structure.sources import ROOT

ROW = re.compile(r"^\| .+ \| `(\w+)` \| .+ \| (\d+) \| (.+) \|$", re.MULTILINE)


def test_the_table_lists_the_shapes_that_are_tested() -> None:
    shapes: dict[str, int] = defaultdict(int)
    layouts: dict[str, list[str]] = defaultdict(list)
    for family, count, names in ROW.findall((ROOT / "docs" / "huggingface.md").read_text()):
        shapes[family] += int(count)
        layouts[family] += names.split("; ")
    assert shapes == {family: sum(model_type(name) == family for name in CASES) for family in families().rows}
    expected: dict[str, list[str]] = defaultdict(list)
    for name in LAYOUT_CASES:
        expected[model_type(name)].append(name.partition(", ")[2] or "default")
    assert layouts == expected


def test_every_proof_has_every_family() -> None:
    for names in (CASES, WITH_GRADIENTS, GENERATED, LAYOUT_CASES):
        assert {model_type(name) for name in names} == set(families().rows)


def test_contributing_shows_lines_that_exist() -> None:
    """Every line of its example of a family is a line of the file that the comment above it names."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = re.findall(r"^## Add a model family$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in re.findall(r"```\w+\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    shown, text = 0, ""
    for line in filter(str.strip, lines):
        if line.startswith("#"):
            file = re.match(r"# ([\w/]+\.\w+):", line)
            text = (ROOT / file[1]).read_text() if file else text
        else:
            shown += 1
            assert re.search(rf"^\s*{re.escape(line.strip())}$", text, re.MULTILINE), line
    assert shown > 10
