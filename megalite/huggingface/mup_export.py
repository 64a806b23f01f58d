"""A model that was trained under maximal update parametrization (`model.mup`) as a plain model.

Files of Hugging Face know nothing of a base. The factor on the input of the head goes into an untied head,
and into the field of the family's logit scale where the embedding is the head; the factor on the output of
blocks goes into the last matrix of each, or into the norm of its output.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.config.sections.model import ModelConfig
from megalite.huggingface.files import ConversionError
from megalite.model.kinds import blocks_of
from megalite.model.mtp.losses import layer_count
from megalite.model.parameters import layer_specs

LAST = ("out", "down", "latent_out")
"""Modules that compute the output of a block."""


def as_plain_model(model: ModelConfig) -> tuple[ModelConfig, dict[str, float]]:
    """Return the model without `mup`, and factors on its stored tensors by name.

    Raises:
        ConversionError: a norm's weight cannot take a factor.
    """
    if model.mup is None:
        return model, {}
    factors: dict[str, float] = {}
    plain = replace(model, mup=None)
    if model.width_growth != 1.0 and model.tied_head:
        plain = replace(plain, logit_scale=model.logit_factor)
    elif model.width_growth != 1.0:
        factors["head.weight"] = 1.0 / model.width_growth
    if model.depth_growth != 1.0:
        factors |= dict.fromkeys(_outputs(model), 1.0 / model.depth_growth)
    return plain, factors


def _outputs(model: ModelConfig) -> list[str]:
    """Return the names of the tensors that a block's output is linear in."""
    names: list[str] = []
    for layer in range(layer_count(model)):
        own = [segment.name for spec in layer_specs(model, layer, 1) for segment in spec.segments]
        for block in blocks_of(model, layer):
            if block.output_norm:
                if model.norm_offset:
                    raise ConversionError(
                        f"model.mup = {model.mup} divides the output of blocks by {model.depth_growth:g}, "
                        f"which the norm of {block.name} cannot take, because model.norm_offset = "
                        f"{model.norm_offset:g}. Train without base_depth to export such a model."
                    )
                names += [name for name in own if name.startswith(f"{block.name}.output_norm.")]
                continue
            last = [name for name in own if name.startswith(f"{block.name}.") and _module(name) in LAST]
            through_latent = any(_module(name) == "latent_out" for name in last)
            names += [name for name in last if not (through_latent and ".experts." in name)]
    return names


def _module(name: str) -> str:
    return name.split(".")[-2]
