"""Router biases: one tensor per mixture in Hugging Face's files, a state of all routers in ours.

A checkpoint has the states `router/bias` and `router/load`, [layers, experts] fp64 each, and with modules of
multi-token prediction the same of these; files have the first in fp32, and the second is equal at the start
of a run. See `megalite.model.blocks.mixture.router_states`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalite.checkpoint import Manifest
from megalite.checkpoint.inspect import whole
from megalite.config.sections.model import ModelConfig
from megalite.families.module_names import names_of
from megalite.huggingface.files import ConversionError
from megalite.model.mtp.losses import layer_count

PREFIX = "router/"
BIAS, LOAD = f"{PREFIX}bias", f"{PREFIX}load"
MTP_BIAS, MTP_LOAD = f"{PREFIX}mtp_bias", f"{PREFIX}mtp_load"


def bias_names(model: ModelConfig, family: str) -> dict[int, str]:
    """Return layer → its tensor in Hugging Face's files; empty for families without router biases."""
    names = names_of(model, family)
    layers = range(layer_count(model)) if names.router_bias else ()
    return {
        layer: f"{names.layers}.{layer}.{names.router_bias}" for layer in layers if model.is_mixture(layer)
    }


def bias_shape(model: ModelConfig, family: str) -> tuple[int, ...]:
    """Return the shape of each of these tensors."""
    rows, experts = names_of(model, family).router_bias_rows, model.num_experts or 0
    return (experts,) if rows is None else (rows, experts)


def states(model: ModelConfig, biases: Mapping[int, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the initial states of a model with the biases of a file; empty if it computes with none."""
    if not (biases or model.biased_choice):
        return {}
    experts = model.num_experts or 0
    bias = torch.zeros(layer_count(model), experts, dtype=torch.float64)
    for layer, name in biases.items():
        bias[layer] = tensors[name].flatten()
    own, mtp = bias.split((model.num_hidden_layers, model.mtp_layers))
    states = {BIAS: own, LOAD: own} | ({MTP_BIAS: mtp, MTP_LOAD: mtp} if len(mtp) else {})
    equal = model.num_experts_per_tok / experts
    return {
        name: torch.full_like(each, equal) if name in (LOAD, MTP_LOAD) else each
        for name, each in states.items()
    }


def fill(tensor: Tensor, values: Tensor | None, offsets: Sequence[int]) -> None:
    """Fill a rectangle of a state, which keeps its initial value without `values`."""
    if values is not None:
        tensor.copy_(
            values[tuple(slice(low, low + size) for low, size in zip(offsets, tensor.shape, strict=True))]
        )


def to_export(manifest: Manifest, model: ModelConfig, family: str) -> dict[str, Tensor]:
    """Return the bias tensors of an export; zero if the checkpoint has no router states.

    Raises ConversionError if the model's routers have biases, and files of the family do not.
    """
    biases, shape = bias_names(model, family), bias_shape(model, family)
    if BIAS not in manifest.tensors or not (biases or model.biased_choice):
        return {name: torch.zeros(shape) for name in biases.values()}
    stored = [manifest.tensors[name] for name in (BIAS, MTP_BIAS) if name in manifest.tensors]
    bias = torch.cat(
        [torch.from_numpy(whole(manifest, each)).view(torch.float64).squeeze(-1) for each in stored]
    )
    if not biases and bias.any():
        raise ConversionError(
            f"{manifest.directory} has biases of routers, which files of {family} models do not have"
        )
    return {name: bias[layer].float().view(shape) for layer, name in biases.items()}
