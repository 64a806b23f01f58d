"""Whether an architecture of llama.cpp computes a model, and what it lacks if not."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose, sqrt

from megalite.config.sections.model import ModelConfig
from megalite.gguf.architectures import ARCHITECTURES, Architecture
from megalite.gguf.metadata import period_of
from megalite.huggingface.files import ConversionError
from megalite.model.parameters import model_specs

WITHOUT_QUERY_LATENTS = (26, 27)
"""The numbers of layers by which llama.cpp knows models without latents of queries."""
SOFTMAX_GROUPS = "chooses groups of experts by their two largest scores (model.group_score)"


def architecture_of(model: ModelConfig, family: str) -> Architecture:
    """Return the architecture of a family.

    Raises ConversionError if llama.cpp has none that computes the model. The message lists what it lacks.
    """
    if family not in ARCHITECTURES:
        raise ConversionError(
            f"llama.cpp has no architecture that computes {family} models. Families with one: "
            f"{', '.join(ARCHITECTURES)}. Export to safetensors instead, without --format gguf."
        )
    architecture = ARCHITECTURES[family].of(model)
    if lacking := list(missing(model, architecture)):
        lines = "".join(f"\n  - {line}" for line in lacking)
        raise ConversionError(
            f"llama.cpp's architecture {architecture.name} does not compute this {family} model: it{lines}\n"
            "Export to safetensors instead, without --format gguf."
        )
    return architecture


def missing(model: ModelConfig, architecture: Architecture) -> Iterator[str]:
    """Yield what an architecture lacks to compute a model."""
    layers = range(model.num_hidden_layers)
    kinds = {kind for layer in layers for kind in model.block_names(layer)}
    for name, values in architecture.fixed.items():
        value = getattr(model, name)
        if value not in (values if isinstance(values, tuple) else (values,)) and _concerns(name, kinds):
            yield f"has {name} = {values}, and this model {value}"
    if model.hidden_act not in architecture.activations:
        yield (
            f"has the activation {' or '.join(architecture.activations)} (model.hidden_act is "
            f"{model.hidden_act})"
        )
    if model.output_head == "reward":
        yield "has no head of a reward model (model.output_head)"
    yield from _attention(model, architecture, kinds)
    yield from _layers(model, architecture)
    if "mixture" in kinds:
        yield from _mixture(model, architecture)
    yield from _mixers(model, kinds)
    for module in _biased(model):
        if module not in architecture.biases:
            yield f"has no bias of {module}"
    if architecture.embedding_scale == "sqrt" and not isclose(
        model.embedding_scale or 1.0, sqrt(model.hidden_size), rel_tol=1e-2
    ):
        yield f"multiplies embeddings by sqrt(hidden_size) (model.embedding_scale is {model.embedding_scale})"
    if architecture.tied and not model.tied_head:
        yield "has no head besides the embedding (model.tie_word_embeddings)"


def _concerns(name: str, kinds: set[str]) -> bool:
    """Return whether a field says something of a model with blocks of these kinds."""
    field = ModelConfig.__dataclass_fields__[name]
    owners = field.metadata.get("kinds")
    return not owners or not kinds.isdisjoint(owners)


def _attention(model: ModelConfig, architecture: Architecture, kinds: set[str]) -> Iterator[str]:
    if architecture.square and model.num_attention_heads * model.head_size != model.hidden_size:
        yield "has heads whose widths add up to hidden_size (model.head_dim)"
    if architecture.all_heads and model.kv_heads != model.num_attention_heads:
        yield "has as many key-value heads as heads (model.num_key_value_heads)"
    scaling = (model.rope_scaling or {}).get("rope_type", "default")
    if model.position == "rope" and scaling not in (*architecture.rope_types, "default", "linear", "yarn"):
        yield f"has no rotary scaling of type {scaling} (model.rope_scaling)"
    if _lacks_query_latents(model, architecture):
        layers = " or ".join(map(str, WITHOUT_QUERY_LATENTS))
        yield f"has latents of queries except with {layers} layers (model.q_lora_rank)"
    if model.kv_lora_rank is not None and scaling != "yarn" and model.attention_scale is not None:
        yield "has no scale of the scores but that of yarn (model.attention_scale)"
    if (
        model.position == "none"
        and architecture.no_rope not in ("finetuned", "family")
        and "attention" in kinds
    ):
        yield "has rotary embeddings (model.position)"
    local = model.local_attention or {}
    if local.get(
        "partial_rotary_factor", model.partial_rotary_factor
    ) != model.partial_rotary_factor or local.keys() - {
        "num_key_value_heads",
        "partial_rotary_factor",
    }:
        yield (
            "has the same heads in all layers, but for the number of key-value heads (model.local_attention)"
        )


def _lacks_query_latents(model: ModelConfig, architecture: Architecture) -> bool:
    """Return whether an architecture expects latents of queries, which the model does not have."""
    expected = architecture.name in ("deepseek2", "mistral4")
    lite = model.num_hidden_layers in WITHOUT_QUERY_LATENTS
    return expected and not lite and model.kv_lora_rank is not None and model.q_lora_rank is None


def _layers(model: ModelConfig, architecture: Architecture) -> Iterator[str]:
    layers = range(model.num_hidden_layers)
    local = [model.window(layer) is not None for layer in layers]
    without = [not model.uses_rope(layer) for layer in layers]
    if isinstance(architecture.windows, int) and any(local) and period_of(local) != architecture.windows:
        yield f"has windows in all layers but every {architecture.windows}th (model.sliding_window_layers)"
    if architecture.windows == "period" and any(local) and period_of(local) is None:
        yield "has windows in all layers but every nth (model.sliding_window_layers)"
    if any(local) and model.num_hidden_layers not in (architecture.window_layers or layers.stop,):
        yield f"has windows only with {architecture.window_layers} layers (model.num_hidden_layers)"
    if model.position == "rope" and without != _without_rope(architecture, local):
        yield "has rotary embeddings in other layers (model.no_rope_layers)"
    if (
        architecture.recurrent
        and len(
            {
                "attention" in name
                for each in layers
                for name in model.block_names(each)
                if "mix" not in name and "feed" not in name
            }
        )
        < 2
    ):
        yield "has both layers with and without attention (model.layer_blocks)"
    if (
        architecture.recurrent == "interval"
        and period_of(["delta" in model.block_names(each) for each in layers]) is None
    ):
        yield "has attention in every nth layer alone (model.layer_blocks)"


def _without_rope(architecture: Architecture, local: list[bool]) -> list[bool]:
    """Return which layers have no rotary embeddings in an architecture.

    Args:
        local: which layers have a window.
    """
    if architecture.no_rope == "global" and any(local):
        return [not each for each in local]
    step = architecture.no_rope if isinstance(architecture.no_rope, int) else None
    return [step is not None and (layer + 1) % step == 0 for layer in range(len(local))]


def _mixture(model: ModelConfig, architecture: Architecture) -> Iterator[str]:
    layers = [
        layer
        for layer in range(model.num_hidden_layers)
        if set(model.block_names(layer)) & {"mixture", "feed_forward"}
    ]
    sparse = [layer for layer in layers if "mixture" in model.block_names(layer)]
    leading = layers[len(layers) - len(sparse) :] if architecture.dense == "leading" else layers
    if sparse != leading:
        before = ", but for the first ones" if architecture.dense == "leading" else ""
        yield f"has experts in all layers{before} (model.mlp_only_layers, decoder_sparse_step)"
    if (model.n_group or 1) > 1 and model.counted_in_group != 2:
        yield SOFTMAX_GROUPS
    if (model.norm_topk_min or 0.0) > LEAST_SUM:
        yield f"has a least sum of weights of experts of {LEAST_SUM:.1e} (model.norm_topk_min)"


LEAST_SUM = 2.0**-14
"""llama.cpp's least sum of the weights of a token's experts by which they are divided."""


def _mixers(model: ModelConfig, kinds: set[str]) -> Iterator[str]:
    if "mamba" in kinds:
        if model.mamba_norm == "norm_first":
            yield "has norms of mamba blocks after the gate (model.mamba_norm)"
        if model.mamba_time_step_limit is not None:
            yield "has no limits of the steps of mamba blocks (model.mamba_time_step_limit)"
        if model.mamba_proj_bias:
            yield "has no biases of the projections of mamba blocks (model.mamba_proj_bias)"
    if "convolution" in kinds and model.conv_bias:
        yield "has no biases of convolution blocks (model.conv_bias)"
    if "delta" in kinds:
        if model.linear_key_head_dim != model.linear_value_head_dim:
            yield "has keys and values of delta blocks of the same width (model.linear_value_head_dim)"
        if model.delta_negative_eigenvalues or model.delta_norm_eps is not None:
            yield "has no negative eigenvalues of delta blocks, and no epsilon of theirs"
        if model.delta_decay == "channel" and model.q_lora_rank is not None:
            yield "has no latents of queries (model.q_lora_rank)"


def _biased(model: ModelConfig) -> list[str]:
    """Return our modules of a layer that have a bias, other than norms and mixers."""
    names = (segment.name.split(".", 2) for spec in model_specs(model) for segment in spec.segments)
    modules = {
        parts[2].removesuffix(".bias") for parts in names if len(parts) == 3 and parts[2].endswith(".bias")
    }
    return sorted(each for each in modules if "norm" not in each and not each.startswith("mixer."))
