"""Constants of xIELU, which transformers' files have as tensors of each layer: β and ε.

Ours are the numbers of `megalite_kernels.xielu`, so an import checks those of a file, and an export writes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.families.module_names import names_of

ROUNDING = 2.0**-8
"""Largest relative error of a number in bf16."""


def constants(model: ModelConfig, family: str) -> dict[str, float]:
    """Return the names of the tensors in Hugging Face's files, and their values."""
    if model.hidden_act != "xielu":
        return {}
    names = names_of(model, family)
    layers = range(model.num_hidden_layers)
    return {f"{names.layers}.{at}.{name}": value for at in layers for name, value in names.xielu.items()}


def wrong(
    expected: Mapping[str, float], weights: Mapping[str, Tensor], stored: Callable[[str], str]
) -> list[str]:
    """Return a line for each constant of a file that has another value.

    Args:
        stored: returns the name that a file has for a family's name.
    """
    present = {stored(name): value for name, value in expected.items() if stored(name) in weights}
    return [
        f"{name} is {weights[name].item():.6g}, but only {value} is supported"
        for name, value in present.items()
        if not abs(weights[name].item() - value) <= ROUNDING * abs(value)
    ]


def to_export(model: ModelConfig, family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of an export."""
    return {name: torch.tensor(value, dtype=dtype) for name, value in constants(model, family).items()}
