"""The wheel holds megalite and megalite_kernels, side by side, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import megalite
from tests.structure.sources import ROOT, python


def test_the_wheel_holds_the_two_packages(tmp_path: Path):
    tree, out = tmp_path / "tree", tmp_path / "out"  # a copy: a build leaves its traces in the tree
    for name in ("megalite", "kernels", "tests/structure", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "pretrain.py"):
        shutil.copy(ROOT / name, tree / name)
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=tree, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    assert wheel.name.startswith(f"megalite-{megalite.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        archive.extractall(tmp_path / "installed")
    packages = ROOT / "megalite", ROOT / "kernels" / "megalite_kernels"
    sources = [path for package in packages for pattern in ("*.py", "*.yaml") for path in package.rglob(pattern)]
    assert len(names) == len(sources)
    assert {name.partition("/")[0] for name in names} == {"megalite", "megalite_kernels"}
    code = "import megalite.parallel.tensor.linear as a, megalite_kernels.norm as b; print(a.__file__, b.__file__)"
    found = python(code, first_on_path=tmp_path / "installed", cwd=tmp_path).split()
    assert all(Path(path).is_relative_to(tmp_path / "installed") for path in found)
