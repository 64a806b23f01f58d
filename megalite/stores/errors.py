"""Errors of stores."""

from __future__ import annotations

from megalite.config.errors import ConfigError


class StoreError(ConfigError):
    """Raised if a store cannot be reached or used. The message names the URL, the reason and a way out."""


class ConflictError(StoreError):
    """Raised if an object is no longer what this process knew: another process has written it."""


def reason(error: BaseException) -> str:
    """Return the message of an error of a store in one line, with its type if it does not say much."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}".removesuffix(": ")
