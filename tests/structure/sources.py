"""The project's source files, parsed, and Python processes in which imports are examined."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = [ROOT / "pretrain.py", *sorted((ROOT / "megalite").rglob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]
PROGRAM = [*CORE, *sorted((ROOT / "tools").rglob("*.py"))]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; tests must not change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def python(code: str, *arguments: str, first_on_path: Path | None = None, cwd: Path = ROOT) -> str:
    """Run `code` in a new Python process and return its output. The test fails if the process fails."""
    paths = [str(first_on_path)] if first_on_path else []
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths += [str(ROOT / path) for path in inherited if path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
