"""Offsets are counted in 64 bits."""

import os

from tests.kernels.compiling import MODULES
from tests.structure.sources import ROOT, python


def test_tensors_of_more_than_two_to_the_31_elements(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]))
    assert python("import runpy; runpy.run_module('tests.kernels.offsets', run_name='__main__')").split() == MODULES
