"""The order of Megatron-LM's parameters in a stage.

The legacy format has the state of an optimizer by the number of the parameter: the parameters of each group
one after another, in the order in which modules are built.
"""

from __future__ import annotations

import re

_MODULES = (
    *("embedding.word_embeddings", "embedding.position_embeddings", "input_layernorm"),
    *("self_attention", "mixer", "norm", "pre_mlp_layernorm", "mlp"),
    *("decoder.final_layernorm", "decoder.final_norm", "output_layer"),
)
_INNER = (
    *(
        "core_attention",
        "dt_bias",
        "A_log",
        "D",
        "gate_weight",
        "router",
        "fc1_latent_proj",
        "fc2_latent_proj",
    ),
    *("experts", "shared_experts"),
    *("linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm"),
    *("in_proj", "conv1d", "norm", "out_norm", "out_proj", "linear_fc1", "linear_fc2"),
)
_TENSORS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "expert_bias", "_extra_state")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_NUMBERED = re.compile(r"(weight|bias)(\d+)")


def parameter_order(name: str) -> tuple[int, ...]:
    """Return the key by which the parameters of a stage are sorted, and the other entries of its state dict.

    Layers stand between the ends.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        module, _, tensor = name.rpartition(".")
        first = _MODULES.index(module)
        return (0 if first < 2 else 2, first, _TENSORS.index(tensor))
    inner, *rest = match[2].split(".")
    return (1, int(match[1]), _MODULES.index(inner), *(number for part in rest for number in _key(part)))


def _key(part: str) -> tuple[int, ...]:
    if part in _TENSORS:
        return (_TENSORS.index(part), 0)
    if part in _INNER:
        return (_INNER.index(part),)
    if numbered := _NUMBERED.fullmatch(part):
        return (_TENSORS.index(numbered[1]), int(numbered[2]))
    return (0, int(part)) if part.isdigit() else (0,)  # of local_experts
