"""The operations of a layer that train.recompute may name, and lists of layers that recompute differently.

    mlp_in+attn_norm                every layer recomputes these operations
    4*mlp_in+attn_norm,28*none      the first four layers do, the others recompute nothing

`planner.budget` writes such lists.
"""

from __future__ import annotations

import re
from functools import lru_cache

OPERATIONS = {
    "attn_norm": "the norm in front of attention, or of a block with a state",
    "qkv": "queries, keys and values",
    "scores": "the probabilities of attention, where they are kept",
    "attention": "attention's output",
    "attn_out": "the output projection, where it keeps something",
    "mlp_norm": "the norm in front of the feed-forward",
    "residual": "the residual sum in front of the feed-forward, and its norm",
    "mlp_in": "the input of the activation",
    "mlp_out": "the down projection, where it or a norm keeps something",
    "experts": "a whole mixture of experts",
    "mixer_in": "the projection of a delta, mamba or convolution block",
    "mixer": "the output of its recurrence or convolution",
}
"""Name → what is computed again. `megalite.model.kinds` adds those of kinds that are registered."""
BUDGET = "budget"
SIMPLE = re.compile(r"none|selective|full|every-[1-9]\d*")
_ENTRY = re.compile(r"(?:([1-9]\d*)\*)?(.+)")


def operations_of(mode: str) -> frozenset[str]:
    """The operations that a layer's mode names; none for none and full."""
    return frozenset({"selective": ("scores",), "none": (), "full": ()}.get(mode, mode.split("+")))


def is_mode(mode: str) -> bool:
    """Whether one layer can recompute like this."""
    return mode in ("none", "selective", "full") or set(mode.split("+")) <= OPERATIONS.keys()


@lru_cache(maxsize=64)
def layers_of(recompute: str) -> tuple[str, ...] | str:
    """The mode of every layer of a list, or of all layers if it is a single mode. Raises ValueError."""
    modes: list[str] = []
    for entry in recompute.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or not is_mode(match[2]):
            raise ValueError(f"has {entry.strip()}, which is not a recomputation mode")
        if match[1] is None and "," not in recompute:
            return match[2]
        modes += [match[2]] * int(match[1] or 1)
    return tuple(modes)


def mode_of(recompute: str, layer: int) -> str:
    """What one layer recomputes. A budget that is not resolved yet is none."""
    if recompute == BUDGET:
        return "none"
    if recompute.startswith("every-"):
        return "full" if layer % int(recompute.removeprefix("every-")) == 0 else "none"
    if recompute in ("none", "selective", "full"):
        return recompute
    modes = layers_of(recompute)
    return modes if isinstance(modes, str) else modes[layer]


def shown(recompute: str) -> str:
    """For people: budget in place of operations that it has chosen."""
    return recompute if SIMPLE.fullmatch(recompute) else BUDGET


def problem(recompute: str, layers: int) -> str | None:
    """What is wrong with a value of train.recompute for a model of so many layers; None: nothing."""
    if recompute == BUDGET or SIMPLE.fullmatch(recompute):
        return None
    try:
        modes = layers_of(recompute)
    except ValueError as error:
        return str(error) if "," in recompute else "is not a recomputation mode"
    if isinstance(modes, tuple) and len(modes) != layers:
        return f"is a list of {len(modes)} layers, and the model has {layers}"
    return None


def written(modes: list[str]) -> str:
    """The modes of all layers as train.recompute has them."""
    if len(set(modes)) == 1:
        return modes[0]
    runs: list[tuple[str, int]] = []
    for mode in modes:
        runs = [*runs[:-1], (mode, runs[-1][1] + 1)] if runs and runs[-1][0] == mode else [*runs, (mode, 1)]
    return ",".join(f"{count}*{mode}" for mode, count in runs)
