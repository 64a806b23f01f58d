"""Selection of the options of `attend` for the attention kernels.

The other options belong to context parallelism.
"""

from __future__ import annotations

from typing import Any

_OF_CONTEXT = {"part", "sinks", "expand"}
# attention of a part never keeps probabilities, and its queries do not form whole documents
_NOT_OF_PARTS = {"recompute", "boundaries"}


def whole_row_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `megalite_kernels.attention`, which attends over whole rows."""
    return {name: value for name, value in options.items() if name not in _OF_CONTEXT}


def part_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `megalite_kernels.attention_part`, which attends over parts of rows."""
    whole = whole_row_options(options)
    return {name: value for name, value in whole.items() if name not in _NOT_OF_PARTS}
