"""The error of a field of config.json with a value that is not supported. Imports no torch."""

from __future__ import annotations

from typing import Any

from megalite.config.errors import ConfigError


def refuse(name: str, value: Any, why: str) -> ConfigError:
    """Return the error for a field's value; `why` says what is wrong and what is supported."""
    return ConfigError(f"config.json: {name} = {value!r} {why}")
