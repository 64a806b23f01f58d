"""Places of our tensors in Megatron-LM's, and how its tensor parallelism divides these.

Here every tensor of Megatron-LM has one name, that of its local layer specification, with the number of the
layer and of the expert in the model (`decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight`), and
is whole. How both formats spell the names, and which parts they store, follows from these
(`megatron_spelling`).

    linear_qkv        queries, keys and values by key-value head, with an output gate after the queries
    linear_fc1        gate, then up
    in_proj           z, x, B, C, dt (Mamba), or q, k, v, z, b, a (gated delta net)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.checkpoint import CheckpointError
from megalite.config.sections.model import ModelConfig
from megalite.families.module_names import Names
from megalite.huggingface.head_order import rotated_channels, rows_of
from megalite.huggingface.tensor_places import TensorPlace, named_places
from megalite.model.parameters import weight_shapes

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
POSITIONS = "embedding.position_embeddings.weight"
LAYERS = "decoder.layers."
_MAMBA = {
    "mixer.in_proj": "mixer.z mixer.x mixer.B mixer.C mixer.dt",
    "mixer.conv1d": "mixer.conv_x mixer.conv_B mixer.conv_C",
    "mixer.A_log": "mixer.a_log",
    "mixer.D": "mixer.d",
    "mixer.dt_bias": "mixer.dt_bias",
    "mixer.norm": "mixer.norm",
    "mixer.out_proj": "mixer.out",
}
_DELTA = {
    "self_attention.in_proj": "mixer.q mixer.k mixer.v mixer.z mixer.b mixer.a",
    "self_attention.conv1d": "mixer.conv_q mixer.conv_k mixer.conv_v",
    "self_attention.A_log": "mixer.a_log",
    "self_attention.dt_bias": "mixer.dt_bias",
    "self_attention.out_norm": "mixer.norm",
    "self_attention.out_proj": "mixer.out",
}
_LAYER = {
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv": "attention.q attention.gate attention.k attention.v",
    "self_attention.linear_q_proj": "attention.q",
    "self_attention.linear_q_down_proj": "attention.q_a",
    "self_attention.linear_q_up_proj": "attention.q_b",
    "self_attention.linear_kv_down_proj": "attention.kv_a",
    "self_attention.linear_kv_up_proj": "attention.kv_b",
    "self_attention.q_layernorm": "attention.q_norm attention.q_a_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attention.kv_layernorm": "attention.kv_a_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.gate mlp.up",
    "mlp.linear_fc2": "mlp.down",
    "mlp.router": "mlp.router",
    "mlp.experts.local_experts.{}.linear_fc1": "mlp.experts.in",
    "mlp.experts.local_experts.{}.linear_fc2": "mlp.experts.down",
    "mlp.shared_experts.linear_fc1": "mlp.shared.gate mlp.shared.up",
    "mlp.shared_experts.linear_fc2": "mlp.shared.down",
    "mlp.shared_gate": "mlp.shared_gate",
    "mlp.fc1_latent_proj": "mlp.latent_in",
    "mlp.fc2_latent_proj": "mlp.latent_out",
}
_RENAMED = {"mlp.shared_gate.weight": "mlp.shared_experts.gate_weight"}
ROUTER_BIAS = "mlp.router.expert_bias"


@dataclass(frozen=True)
class Part:
    """Rows of one of our tensors, and their rows in Megatron-LM's tensor."""

    ours: str
    first: int
    rows: range | tuple[int, ...]


@dataclass(frozen=True)
class MegatronTensor:
    """A whole tensor of Megatron-LM.

    Attributes:
        shape: its shape.
        flat: the same without dimensions of one element that ours does not have, [rows, …].
        parts: ours in it; empty for biases of routers.
        sections: numbers of rows of what tensor parallelism divides separately along dim 0; one: all rows.
        split: the dimension that tensor parallelism divides; None: each rank has the whole tensor.
        expert: the number of its expert, or None.
    """

    name: str
    shape: tuple[int, ...]
    flat: tuple[int, ...]
    parts: tuple[Part, ...]
    sections: tuple[int, ...]
    split: int | None
    expert: int | None = None

    @property
    def layer(self) -> int | None:
        """The number of its layer, or None outside of the layers."""
        return int(self.name.split(".")[2]) if self.name.startswith(LAYERS) else None

    @property
    def local(self) -> str:
        """Its name in its layer, or its whole name."""
        return self.name.split(".", 3)[3] if self.layer is not None else self.name

    @property
    def decays(self) -> bool:
        """Whether weight decay applies in Megatron-LM, which leaves out vectors and biases."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")


def megatron_tensors(model: ModelConfig) -> dict[str, MegatronTensor]:
    """Return name → tensor for all weights of a model in Megatron-LM, in the order of our units.

    Raises:
        CheckpointError: Megatron-LM has no tensor for one of the model's.
    """
    places = _places(model)
    shapes = weight_shapes(model)
    if homeless := [name for name in shapes if name not in places]:
        raise CheckpointError(
            f"Megatron-LM has no tensor for {homeless[0]} [{', '.join(map(str, shapes[homeless[0]]))}] of "
            "this model. "
            "Use a Hugging Face directory (megalite convert export without --format)."
        )
    stored_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    parts: dict[str, list[Part]] = {}
    for ours in shapes:
        place, first = places[ours], 0
        for theirs, shape in place.tensors.items():
            name = _renamed(theirs, model)
            rows = range(shape[0]) if place.pieces else place.rows
            flat = (shape[0], *place.shape[1:])
            stored_shapes[name] = shape, flat
            parts.setdefault(name, []).append(Part(ours, first, rows))
            first += len(rows)
    tensors = {
        name: MegatronTensor(
            name,
            shape,
            flat,
            tuple(parts[name]),
            _sections(name, shape, parts[name], model),
            _split(name),
            _expert(name),
        )
        for name, (shape, flat) in stored_shapes.items()
    }
    for name in router_biases(model).values():
        experts = (model.num_experts or 0,)
        tensors[name] = MegatronTensor(name, experts, experts, (), experts, None)
    return tensors


def router_biases(model: ModelConfig) -> dict[int, str]:
    """Return layer → the tensor of its router's bias, if the choice of experts has one."""
    if model.router_balance != "bias":
        return {}
    layers = range(model.num_hidden_layers)
    return {layer: f"{LAYERS}{layer}.{ROUTER_BIAS}" for layer in layers if model.is_mixture(layer)}


def _places(model: ModelConfig) -> dict[str, TensorPlace]:
    hybrid = any(len(model.block_names(layer)) == 1 for layer in range(model.num_hidden_layers))
    ends = {
        "embedding.word_embeddings": "embedding",
        "embedding.position_embeddings": "positions",
        f"decoder.{'final_norm' if hybrid else 'final_layernorm'}": "norm",
        "output_layer": "head",
    }
    latent = model.kv_lora_rank is not None
    layer = _LAYER | ({"self_attention.linear_qkv": "attention.none"} if latent else _QKV_ONLY)
    places: dict[str, TensorPlace] = {}
    for mixer, modules in (("mamba", _MAMBA), ("delta", _DELTA)):
        names = Names(ends, "decoder.layers", layer | modules, grouped="linear_qkv", interleaved=latent)
        for name, place in named_places(model, names).items():
            number = name.split(".")[1] if name.startswith("layers.") else None
            kinds = () if number is None else model.block_names(int(number))
            if ".mixer." not in name or mixer in kinds:
                places[name] = place
    for index in range(model.num_hidden_layers):
        if "attention" in model.block_names(index) and model.attention_gate:
            places |= _gated(model, index, places)
    return places


_QKV_ONLY = {"self_attention.linear_q_proj": "attention.none"}


def _gated(model: ModelConfig, layer: int, places: dict[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Return the places of q, gate, k and v of a layer, which stand in this order for each key-value head."""
    heads, kv_heads, size, _, rotating = model.attention_shape(layer)
    queries, width = heads // kv_heads, 2 * (heads // kv_heads) + 2
    order = {
        "q": [head // queries * width + head % queries for head in range(heads)],
        "gate": [head // queries * width + queries + head % queries for head in range(heads)],
        "k": [head * width + 2 * queries for head in range(kv_heads)],
        "v": [head * width + 2 * queries + 1 for head in range(kv_heads)],
    }
    plain = range(size)
    turned = rotated_channels(size, rotating, interleaved=False)
    return {
        name: replace(places[name], rows=rows_of(tuple(slots), tuple(turned if part in "qk" else plain), 0))
        for part, slots in order.items()
        for suffix in ("weight", "bias")
        if (name := f"layers.{layer}.attention.{part}.{suffix}") in places
    }


def _renamed(theirs: str, model: ModelConfig) -> str:
    for ours, name in _RENAMED.items():
        if theirs.endswith(ours):
            return theirs.removesuffix(ours) + name
    if theirs.startswith(LAYERS) and ".input_layernorm." in theirs:
        layer = int(theirs.split(".")[2])
        if "mamba" in model.block_names(layer):
            return theirs.replace(".input_layernorm.", ".norm.")
    return theirs


COLUMN = (
    *("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "in_proj"),
    *("conv1d", "word_embeddings", "output_layer"),
)
DOWN = ("linear_q_down_proj", "linear_kv_down_proj")
"""Projections to latents, which only the local layer specification divides over tp."""
ROW = ("linear_proj", "linear_fc2", "out_proj")
BY_HEAD = ("A_log", "D", "dt_bias", "mixer.norm.weight")


def _split(name: str) -> int | None:
    """Return the dimension that tensor parallelism divides.

    Projections to latents are whole here: a format may divide them (`DOWN`).
    """
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module in COLUMN or name.endswith(BY_HEAD):
        return 0
    return 1 if module in ROW and name.endswith(".weight") else None


def _sections(
    name: str, shape: tuple[int, ...], parts: Sequence[Part], model: ModelConfig
) -> tuple[int, ...]:
    """Return the rows of the sections: gate and up, also of an expert, and parts of in_proj and conv1d."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module in ("in_proj", "conv1d"):
        return tuple(len(part.rows) for part in parts)
    return (shape[0] // 2,) * 2 if module == "linear_fc1" and model.gated_mlp else (shape[0],)


def _expert(name: str) -> int | None:
    head, separator, rest = name.partition(".local_experts.")
    return int(rest.split(".")[0]) if separator else None
