"""The code stays readable: short files and short functions. What has to be read to follow a step is test_reading_path's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.structure.sources import PROGRAM, relative

LONGEST_FILE, LONGEST_FUNCTION = 700, 80


@pytest.mark.parametrize("path", PROGRAM, ids=relative)
def test_files_and_functions_are_short(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f"{node.name}, line {node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}
