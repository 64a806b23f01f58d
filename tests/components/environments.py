"""Environments of components whose pins conflict with ours: `python -m tests.components.environments [NAME ...]`.

A component is another program or library that megalite meets through a process, a server or files. What it
needs is in `requirements/NAME.txt`, with a lower bound for each package, so that a resolver does not fall back
to a release of years ago, and the exact versions are in `locks/NAME.txt`. Its environment is
`.components/NAME` of the checkout, made when it is first used and again when its lock changes. `--lock NAME`
resolves the requirements again and writes the lock. Programs of npm have one version, in `NPM`.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1] / ".components"
OVER_OURS = frozenset({"megatron", "mlflow", "mup", "raytrain", "stores", "trackio", "wandb"})
"""Components that import megalite or torch: where a package is not in their environment, ours has it."""
NPM = {"azurite": "3.35.0"}
"""Packages of npm, and their versions."""
_OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip must not see this checkout


def python_of(name: str) -> Path:
    """Return the interpreter of a component's environment, which is made if it is absent or outdated.

    Raises:
        KeyError: no lock has this name.
    """
    lock = HERE / "locks" / f"{name}.txt"
    if not lock.exists():
        raise KeyError(f"{lock} does not exist: the components are {', '.join(names())}")
    return _environment(name, lock)


def program_of_npm(package: str, program: str) -> Path:
    """Return a program of a package of npm, which is installed if it is absent."""
    directory = ROOT / f"{package}-{NPM[package]}"
    path = directory / "node_modules" / ".bin" / program
    ROOT.mkdir(exist_ok=True)
    with open(ROOT / f"{package}.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not path.exists():
            options = ["--no-audit", "--no-fund", "--no-save", "--prefix", directory]
            subprocess.run(["npm", "install", *options, f"{package}@{NPM[package]}"], check=True, env=_OUTSIDE)
    return path


def names() -> list[str]:
    """Return the components that have a lock."""
    return sorted(lock.stem for lock in (HERE / "locks").glob("*.txt"))


def lock(name: str) -> None:
    """Resolve the requirements of a component, and write the versions that pip takes."""
    python = _environment(name, HERE / "requirements" / f"{name}.txt", anew=True)
    frozen = subprocess.run(
        [python, "-m", "pip", "freeze", "--local", "--exclude", "pip", "--exclude", "setuptools"],
        capture_output=True,
        text=True,
        check=True,
        env=_OUTSIDE,
    )
    (HERE / "locks" / f"{name}.txt").write_text(
        f"# written by python -m tests.components.environments --lock {name}\n" + frozen.stdout
    )
    shutil.rmtree(ROOT / name)


def _environment(name: str, requirements: Path, anew: bool = False) -> Path:
    directory, stamp = ROOT / name, ROOT / name / "installed"
    python = directory / "bin" / "python"
    wanted = hashlib.sha256(requirements.read_bytes() + str(name in OVER_OURS).encode()).hexdigest()
    ROOT.mkdir(exist_ok=True)
    with open(ROOT / f"{name}.lock", "w") as guard:  # two tests may ask for it at once
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not anew and stamp.exists() and stamp.read_text() == wanted:
            return python
        print(f"installing {requirements.relative_to(HERE)} into {directory}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        if name in OVER_OURS:  # before pip runs, which then leaves out what ours satisfies
            site = next((directory / "lib").glob("python*")) / "site-packages"
            (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements]
        subprocess.run(command, check=True, env=_OUTSIDE)
        stamp.write_text(wanted)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help="components (default all that have a lock)")
    parser.add_argument("--lock", action="store_true", help="resolve requirements/NAME.txt, and write the lock")
    options = parser.parse_args()
    for name in options.names or names():
        if options.lock:
            lock(name)
        else:
            print(python_of(name))


if __name__ == "__main__":
    main()
