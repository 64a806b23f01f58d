"""Whether megalite runs from a checkout or is installed, and the directory of its configurations."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = (
    _PACKAGE.parent
    if (_PACKAGE.parent / "pretrain.py").is_file() and (_PACKAGE.parent / "tools" / "plan.py").is_file()
    else None
)
"""The root of the checkout; None if only the package is installed."""
CONFIGS = (CHECKOUT or _PACKAGE) / "configs"
"""The directory of the shipped configurations: `--config NAME` finds NAME.yaml in it."""
