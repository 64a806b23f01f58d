"""Whether megalite runs from a checkout or is installed: where its configurations are, and what its commands are called in messages."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
CHECKOUT = _PACKAGE.parent if (_PACKAGE.parent / "pretrain.py").is_file() and (_PACKAGE.parent / "tools" / "plan.py").is_file() else None
"""The directory of the source around this package; None where only the package is installed."""
CONFIGS = (CHECKOUT or _PACKAGE) / "configs"
"""The shipped configurations, NAME.yaml each: `--config NAME` takes them."""
_SCRIPTS = {
    "train": "pretrain.py",
    "bubble": "tools/bubble_calc.py",
    "convert": "tools/convert_hf.py",
    "import-config": "tools/import_config.py",
    "prepare": "tools/prepare_data.py",
}


def command(name: str) -> str:
    """What a message calls a command: `tools/plan.py` in a checkout, `megalite plan` where megalite is installed."""
    return f"megalite {name}" if CHECKOUT is None else _SCRIPTS.get(name, f"tools/{name}.py")


def torchrun_target() -> str:
    """What torchrun starts to train a model, as one would type it."""
    return "-m megalite train" if CHECKOUT is None else command("train")
