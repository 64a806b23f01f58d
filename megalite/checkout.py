"""Whether megalite runs from a checkout or is installed: the directory of its configurations, and the names of its commands in messages."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
CHECKOUT = _PACKAGE.parent if (_PACKAGE.parent / "pretrain.py").is_file() and (_PACKAGE.parent / "tools" / "plan.py").is_file() else None
"""The root of the checkout; None if only the package is installed."""
CONFIGS = (CHECKOUT or _PACKAGE) / "configs"
"""The directory of the shipped configurations: `--config NAME` finds NAME.yaml in it."""
_SCRIPTS = {
    "train": "pretrain.py",
    "bubble": "tools/bubble_calc.py",
    "convert": "tools/convert_hf.py",
    "import-config": "tools/import_config.py",
    "prepare": "tools/prepare_data.py",
}


def command(name: str) -> str:
    """The name of a command in messages: `tools/plan.py` in a checkout, `megalite plan` if megalite is installed."""
    return f"megalite {name}" if CHECKOUT is None else _SCRIPTS.get(name, f"tools/{name}.py")


def typed(name: str) -> str:
    """A command as a user types it: `megalite plan`, or `python tools/plan.py` in a checkout."""
    return command(name) if CHECKOUT is None else f"python {command(name)}"


def torchrun_target() -> str:
    """The arguments of torchrun that start training."""
    return "-m megalite train" if CHECKOUT is None else command("train")
