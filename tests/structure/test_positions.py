"""Positions come from the loader.

No module below it counts tokens: a rank that holds a part of a row would count them wrong.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.structure.sources import ROOT, parsed, relative

BELOW_THE_LOADER = sorted(path for room in ("model", "parallel") for path in (ROOT / "megalite" / room).rglob("*.py"))
BELOW_THE_LOADER.remove(ROOT / "megalite/parallel/microbatch.py")  # which says what the loader made
BELOW_THE_LOADER.remove(ROOT / "megalite/model/row_cache.py")  # which counts the slots of its stores
BELOW_THE_LOADER.remove(ROOT / "megalite/parallel/quantized/matmuls.py")  # which counts elements of matrices
BELOW_THE_LOADER.remove(ROOT / "megalite/parallel/recheck/pass_record.py")  # which counts the events of a pass
COUNTING = {"arange", "linspace", "cumsum"}


@pytest.mark.parametrize("path", BELOW_THE_LOADER, ids=relative)
def test_no_module_below_the_loader_makes_positions(path: Path):
    """The blocks of kernels count queries and keys from an offset that they are passed:
    `AttentionDropout.position_offset`."""
    calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func).rpartition(".")[2]: call.lineno for call in calls}
    assert {name: line for name, line in names.items() if name in COUNTING} == {}
