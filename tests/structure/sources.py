"""The project's source files, and Python processes of their own to look at imports in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = [ROOT / "pretrain.py", *sorted((ROOT / "megalite").rglob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]
PROGRAM = [*CORE, *sorted((ROOT / "tools").rglob("*.py"))]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python(code: str, *arguments: str, first_on_path: Path | None = None, cwd: Path = ROOT) -> str:
    """What `code` prints in a Python process of its own. Fails the test where the process fails."""
    paths = [str(first_on_path)] if first_on_path else []
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths += [str(ROOT / path) for path in inherited if path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
