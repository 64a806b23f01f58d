"""`megalite --version`: versions of megalite, Python, torch and triton, the devices, and the state of a
checkout."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections import Counter
from typing import Any

import megalite
from megalite.commands.parser import Parser
from megalite.config.checkout import CHECKOUT
from megalite.launch import machine

GIT_S = 5.0  # seconds


def main(argv: list[str]) -> None:
    software = facts()
    print(json.dumps(software) if parser().parse_args(argv).json else described(software))


def parser() -> argparse.ArgumentParser:
    tool = Parser(prog="megalite --version", description=__doc__)
    tool.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    return tool


def facts() -> dict[str, Any]:
    """Return the versions of the software by name.

    The value is None for a package that is not installed, and for the commit outside a checkout.
    """
    return {
        "megalite": megalite.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": machine.version_of("torch"),
        "triton": machine.version_of("triton"),
        "devices": [gpu.name for gpu in machine.gpus()],
        "driver": machine.driver_version(),
        "cores": machine.usable_cores(),
        "platform": platform.platform(),
    }


def commit() -> dict[str, Any] | None:
    """Return the commit of the checkout and whether it is modified; None without a checkout or git."""
    # a checkout inside another repository is not that one's
    if CHECKOUT is None or not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        words = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=GIT_S,
            check=True,
            encoding="utf-8",
            errors="replace",
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"id": words.removesuffix("-dirty"), "modified": words.endswith("-dirty")}


def described(software: dict[str, Any]) -> str:
    state = software["commit"]
    source = f" (git {state['id']}{', modified' if state['modified'] else ''})" if state else ""
    packages = ", ".join(f"{name} {software[name] or 'not installed'}" for name in ("torch", "triton"))
    gpus = ", ".join(f"{count} × {name}" for name, count in Counter(software["devices"]).items())
    driver = f" (driver {software['driver']})" if software["driver"] else ""
    devices = f"{gpus}{driver}" if gpus else "no GPU"
    return (
        f"megalite {software['megalite']}{source}\nPython {software['python']}, {packages}\n{devices}, "
        f"{software['cores']} CPU cores"
    )
