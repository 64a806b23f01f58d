"""The code stays readable: short files, short functions, a core that can be read in an afternoon."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.structure.sources import CORE, PROGRAM, relative

LONGEST_FILE, LONGEST_FUNCTION, LARGEST_CORE = 500, 80, 10_000


@pytest.mark.parametrize("path", PROGRAM, ids=relative)
def test_files_and_functions_are_short(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f"{node.name}, line {node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_the_core_stays_small():
    assert sum(bool(line.strip()) for path in CORE for line in path.read_text().splitlines()) < LARGEST_CORE
