"""The tensors of a GGUF file: their names and shapes, and how each is computed from those of a checkpoint.

A checkpoint has the matrices of all families in one form (`megalite.model.parameters`), and so have these
files: what differs is the order of the channels that rotate, and what an architecture has no key for and is
    multiplied into weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.gguf.architectures import Architecture
from megalite.huggingface.files import ConversionError
from megalite.huggingface.head_order import decoupled_channels, rotated_channels
from megalite.model.parameters import weight_shapes

Shape = tuple[int, ...]
Build = Callable[..., Tensor]

FP32 = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight"),
    *("conv1d.weight", "conv1d_q.weight", "conv1d_k.weight", "conv1d_v.weight", "shortconv.conv.weight"),
)
"""Ends of names of matrices that llama.cpp reads in fp32. Vectors, and what is no weight, are in fp32,
too."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        name: its name in the file.
        shape: its shape, the slowest dimension first.
        ours: the tensors of the checkpoint that it is computed from.
        build: function of these.
    """

    name: str
    shape: Shape
    ours: tuple[str, ...]
    build: Build

    @property
    def fp32(self) -> bool:
        """Whether it is stored in fp32 in a file of any dtype."""
        return len(self.shape) < 2 or self.name.endswith(FP32) or not self.name.endswith(".weight")


NAMES = {
    "input_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "attention.output_norm": "post_attention_norm",
    "mlp.output_norm": "post_ffw_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.gate": "attn_gate",
    "attention.out": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.sinks": "attn_sinks",
    "attention.q_a": "attn_q_a",
    "attention.q_a_norm": "attn_q_a_norm",
    "attention.q_b": "attn_q_b",
    "attention.kv_a": "attn_kv_a_mqa",
    "attention.kv_a_norm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.latent_in": "ffn_latent_down",
    "mlp.latent_out": "ffn_latent_up",
    "mlp.shared.gate": "ffn_gate_shexp",
    "mlp.shared.up": "ffn_up_shexp",
    "mlp.shared.down": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
"""Our modules of a layer whose tensors are in a file as they are, up to the order of channels and factors."""
FUSED = {
    "qkv": ("attn_qkv", "attention.q", "attention.k", "attention.v"),
    "gate_up": ("ffn_up", "mlp.gate", "mlp.up"),
}
"""What `Architecture.fused` names → the tensor, and our modules in it."""
ROTATED = ("attention.q", "attention.k", "attention.q_norm", "attention.k_norm")


def tensors_of(model: ModelConfig, architecture: Architecture, biases: bool) -> list[GgufTensor]:
    """Return the tensors of a file, in the order in which they are written.

    Args:
        biases: whether the routers have biases of the choice (`router_bias`).

    Raises:
        ConversionError: the architecture has no place for a tensor.
    """
    return list(_Tensors(model, architecture, biases).all())


class _Tensors:
    def __init__(self, model: ModelConfig, architecture: Architecture, biases: bool):
        self.model, self.architecture, self.biases = model, architecture, biases
        self.shapes = weight_shapes(model)
        self.left = {
            name for name in self.shapes if not name.endswith((".alpha_p.weight", ".alpha_n.weight"))
        }

    def all(self) -> Iterator[GgufTensor]:
        model = self.model
        embedding = self._own(
            "embedding.weight", "token_embd.weight", _embedding_factor(model, self.architecture)
        )
        yield embedding
        if "positions.weight" in self.shapes:
            yield self._own("positions.weight", "position_embd.weight")
        for layer in range(model.num_hidden_layers):
            yield from self._layer(layer)
        norm = "token_embd_norm" if self.architecture.name.startswith("lfm2") else "output_norm"
        for suffix in ("weight", "bias"):
            if f"norm.{suffix}" in self.shapes:
                yield self._own(f"norm.{suffix}", f"{norm}.{suffix}", offset=self._offset(suffix))
        yield from self._head()
        if self.left:
            raise ConversionError(
                f"llama.cpp's architecture {self.architecture.name} has no place for the tensor "
                f"{min(self.left)}. "
                "Export to safetensors instead."
            )

    def _head(self) -> Iterator[GgufTensor]:
        factor = (self.model.logit_scale or 1.0) if self.architecture.logit_scale == "weights" else 1.0
        if "head.weight" in self.shapes:
            yield self._own("head.weight", "output.weight", factor)
        elif self.architecture.head or factor != _embedding_factor(self.model, self.architecture):
            yield self._own("embedding.weight", "output.weight", factor)

    def _own(
        self, ours: str, theirs: str, factor: float = 1.0, offset: float = 0.0, build: Build | None = None
    ) -> GgufTensor:
        """Return a tensor in the shape of ours."""
        self.left.discard(ours)
        return GgufTensor(theirs, self.shapes[ours], (ours,), _scaled(factor, offset, build))

    def _joined(self, theirs: str, *ours: str, factors: tuple[float, ...] = ()) -> GgufTensor:
        """Return a tensor that has the rows of several of ours."""
        self.left.difference_update(ours)
        rows = sum(self.shapes[name][0] for name in ours)
        build = partial(_concatenated, factors or (1.0,) * len(ours))
        return GgufTensor(theirs, (rows, *self.shapes[ours[0]][1:]), ours, build)

    def _offset(self, suffix: str) -> float:
        return self.model.norm_offset if suffix == "weight" else 0.0

    # ---- layers

    def _layer(self, layer: int) -> Iterator[GgufTensor]:
        prefix = f"layers.{layer}."
        modules = {
            name.removeprefix(prefix).rpartition(".")[0] for name in self.shapes if name.startswith(prefix)
        }
        names = NAMES | self.architecture.names
        if f"{prefix}mixer.x.weight" in self.shapes and f"{prefix}mixer.dt.weight" in self.shapes:
            yield from self._mamba(layer)
        elif f"{prefix}mixer.conv.weight" in self.shapes:
            yield from self._convolution(layer)
        elif f"{prefix}mixer.b.weight" in self.shapes:
            yield from self._delta(layer)
        if "attention.kv_b" in modules:
            yield from self._latent_values(layer)
        if "mlp.experts.in" in modules:
            yield from self._experts(layer)
        plain = [module for module in names if module in modules]
        if "attention.gate" in plain and self.architecture.recurrent == "interval":
            plain.remove("attention.gate")
            plain.remove("attention.q")
            yield self._gated_queries(layer)
        for part, (theirs, *ours) in FUSED.items():
            if part in self.architecture.fused and set(ours) <= {*plain}:
                plain = [module for module in plain if module not in ours]
                yield from self._fused(layer, theirs, ours)
        for module in plain:
            yield from self._module(layer, module, names[module])

    def _module(self, layer: int, module: str, theirs: str) -> Iterator[GgufTensor]:
        for suffix in ("weight", "bias"):
            ours = f"layers.{layer}.{module}.{suffix}"
            if ours not in self.shapes:
                continue
            factor = _factor(self.model, self.architecture, module, suffix)
            offset = self._offset(suffix) if "norm" in module else 0.0
            name = f"blk.{layer}.{theirs}.{suffix}" if theirs[-1] != "." else f"blk.{layer}.{theirs[:-1]}"
            tensor = self._own(ours, name, factor, offset, self._order(layer, module))
            if module.endswith(("q_norm", "k_norm")) and self.model.qk_norm == "each_head":
                size = self.model.head_size
                heads = tensor.shape[0] // size
                tensor = GgufTensor(
                    tensor.name, (heads, size), tensor.ours, _reshaped(tensor.build, (heads, size))
                )
            yield tensor

    def _order(self, layer: int, module: str) -> Build | None:
        """Return a function that puts the rows of a tensor into the architecture's order, or None."""
        model, interleaved = self.model, self.architecture.interleaved
        if model.kv_lora_rank is not None:
            plain = {"attention.q": model.qk_nope_head_dim, "attention.q_b": model.qk_nope_head_dim}
            plain["attention.kv_a"] = model.kv_lora_rank
            if module not in plain or not model.uses_rope(layer):
                return None
            channels = decoupled_channels(plain[module], model.qk_rope_head_dim, interleaved)
        elif module in ROTATED and model.uses_rope(layer):
            _, _, size, _, rotating = model.attention_shape(layer)
            channels = rotated_channels(size, rotating, interleaved)
        else:
            return None
        return partial(_ordered, tuple(channels))

    def _fused(self, layer: int, theirs: str, ours: list[str]) -> Iterator[GgufTensor]:
        """Return the tensors that have the rows of several modules."""
        parts = [list(self._module(layer, module, module)) for module in ours]
        for each in zip(*parts, strict=True):
            shape = (sum(part.shape[0] for part in each), *each[0].shape[1:])
            names = tuple(name for part in each for name in part.ours)
            suffix = each[0].name.rpartition(".")[2]
            build = partial(_each, tuple(part.build for part in each))
            yield GgufTensor(f"blk.{layer}.{theirs}.{suffix}", shape, names, build)

    def _gated_queries(self, layer: int) -> GgufTensor:
        """Return the queries, each head of which is followed by its gates."""
        heads, _, size, _, _ = self.model.attention_shape(layer)
        names = tuple(f"layers.{layer}.attention.{part}.weight" for part in ("q", "gate"))
        self.left.difference_update(names)
        shape = (2 * heads * size, self.shapes[names[0]][1])
        build = partial(_beside, heads, self._order(layer, "attention.q") or (lambda values: values))
        return GgufTensor(f"blk.{layer}.attn_q.weight", shape, names, build)

    def _latent_values(self, layer: int) -> Iterator[GgufTensor]:
        """Return the two parts of the matrix that reads keys and values from latents."""
        model, name = self.model, f"layers.{layer}.attention.kv_b.weight"
        heads, rank = model.num_attention_heads, model.kv_lora_rank or 0
        key, value = model.qk_nope_head_dim, model.v_head_dim
        self.left.discard(name)
        split = partial(_latent_part, heads, key)
        yield GgufTensor(f"blk.{layer}.attn_k_b.weight", (heads, rank, key), (name,), partial(split, True))
        yield GgufTensor(f"blk.{layer}.attn_v_b.weight", (heads, value, rank), (name,), partial(split, False))

    def _experts(self, layer: int) -> Iterator[GgufTensor]:
        model, prefix = self.model, f"layers.{layer}.mlp.experts."
        experts, parts = model.num_experts or 0, ("gate", "up") if model.gated_mlp else ("up",)
        for suffix in ("weight", "bias"):
            into, down = f"{prefix}in.{suffix}", f"{prefix}down.{suffix}"
            if into not in self.shapes:
                continue
            self.left.difference_update((into, down))
            width = self.shapes[into][0] // experts // len(parts)
            for number, part in enumerate(parts):
                shape = (experts, width, *self.shapes[into][1:])
                build = partial(_expert_part, experts, len(parts), number)
                yield GgufTensor(f"blk.{layer}.ffn_{part}_exps.{suffix}", shape, (into,), build)
            shape = (experts, self.shapes[down][0] // experts, *self.shapes[down][1:])
            yield GgufTensor(f"blk.{layer}.ffn_down_exps.{suffix}", shape, (down,), _reshaped(None, shape))
        if self.biases:
            name = f"router.{layer}"
            yield GgufTensor(f"blk.{layer}.exp_probs_b.bias", (experts,), (name,), _scaled())

    # ---- mixers

    def _mamba(self, layer: int) -> Iterator[GgufTensor]:
        model, prefix = self.model, f"layers.{layer}.mixer."
        heads, inner = model.mamba_num_heads, model.mamba_num_heads * model.mamba_head_dim
        parts = tuple(model.mamba_multipliers or (1.0,) * 5)
        names = ("z", "x", "B", "C", "dt")
        factors = {"weight": tuple(model.mamba_in_multiplier * part for part in parts), "bias": parts}
        for suffix, own in factors.items():
            if f"{prefix}z.{suffix}" in self.shapes:
                ours = [f"{prefix}{name}.{suffix}" for name in names]
                yield self._joined(f"blk.{layer}.ssm_in.{suffix}", *ours, factors=own)
            if f"{prefix}conv_x.{suffix}" in self.shapes:
                ours = [f"{prefix}conv_{name}.{suffix}" for name in ("x", "B", "C")]
                yield self._joined(f"blk.{layer}.ssm_conv1d.{suffix}", *ours)
            elif suffix == "bias":  # which llama.cpp always adds
                channels = (inner + 2 * model.mamba_n_groups * model.mamba_state_size,)
                yield GgufTensor(f"blk.{layer}.ssm_conv1d.bias", channels, (), partial(torch.zeros, channels))
            if f"{prefix}out.{suffix}" in self.shapes:
                yield self._own(
                    f"{prefix}out.{suffix}", f"blk.{layer}.ssm_out.{suffix}", model.mamba_out_multiplier
                )
        yield self._shaped(f"{prefix}a_log", f"blk.{layer}.ssm_a", (heads, 1), _decay)
        yield self._shaped(f"{prefix}d", f"blk.{layer}.ssm_d", (heads, 1))
        yield self._own(f"{prefix}dt_bias", f"blk.{layer}.ssm_dt.bias")
        if f"{prefix}norm.weight" in self.shapes:
            groups = (model.mamba_n_groups, inner // model.mamba_n_groups)
            yield self._shaped(f"{prefix}norm.weight", f"blk.{layer}.ssm_norm.weight", groups)

    def _shaped(self, ours: str, theirs: str, shape: Shape, build: Build | None = None) -> GgufTensor:
        self.left.discard(ours)
        return GgufTensor(theirs, shape, (ours,), _reshaped(build, shape))

    def _convolution(self, layer: int) -> Iterator[GgufTensor]:
        prefix, theirs = f"layers.{layer}.mixer.", f"blk.{layer}.shortconv."
        yield self._joined(f"{theirs}in_proj.weight", *(f"{prefix}{part}.weight" for part in "BCx"))
        yield self._own(f"{prefix}conv.weight", f"{theirs}conv.weight")
        yield self._own(f"{prefix}out.weight", f"{theirs}out_proj.weight")

    def _delta(self, layer: int) -> Iterator[GgufTensor]:
        model, prefix, theirs = self.model, f"layers.{layer}.mixer.", f"blk.{layer}."
        if model.delta_decay == "channel":
            yield from self._delta_by_channel(layer)
            return
        turn = self._in_turn if self.architecture.value_heads_in_turn else lambda tensor, **_: tensor
        keys, size = 2 * model.linear_num_key_heads * model.linear_key_head_dim, model.linear_value_head_dim
        own = (f"{prefix}{part}.weight" for part in "qkv")
        yield turn(self._joined(f"{theirs}attn_qkv.weight", *own), first=keys, size=size)
        yield turn(self._own(f"{prefix}z.weight", f"{theirs}attn_gate.weight"), size=size)
        if self.architecture.value_heads_in_turn:
            yield turn(self._own(f"{prefix}b.weight", f"{theirs}ssm_beta.weight"))
            yield turn(self._own(f"{prefix}a.weight", f"{theirs}ssm_alpha.weight"))
        else:
            names = (f"{prefix}b.weight", f"{prefix}a.weight")
            self.left.difference_update(names)
            shape = (2 * model.linear_num_value_heads, model.hidden_size)
            build = partial(_beside, model.linear_num_key_heads, lambda values: values)
            yield GgufTensor(f"{theirs}ssm_ba.weight", shape, names, build)
        taps = (f"{prefix}conv_{part}.weight" for part in "qkv")
        yield turn(self._joined(f"{theirs}ssm_conv1d.weight", *taps), first=keys, size=size)
        decay = self._own(f"{prefix}a_log", f"{theirs}ssm_a", build=_decay)
        yield turn(decay)
        yield turn(self._own(f"{prefix}dt_bias", f"{theirs}ssm_dt.bias"))
        yield self._own(f"{prefix}norm.weight", f"{theirs}ssm_norm.weight")
        yield turn(self._own(f"{prefix}out.weight", f"{theirs}ssm_out.weight"), size=size, dim=1)

    def _in_turn(self, tensor: GgufTensor, first: int = 0, size: int = 1, dim: int = 0) -> GgufTensor:
        """Order value heads by their number within a key head.

        Args:
            first: rows of keys that precede them.
            size: width of a head.
            dim: the dimension that has the heads.
        """
        keys = self.model.linear_num_key_heads
        each = self.model.linear_num_value_heads // keys
        build = partial(_transposed_heads, tensor.build, dim, first, (keys, each, size))
        return GgufTensor(tensor.name, tensor.shape, tensor.ours, build)

    def _delta_by_channel(self, layer: int) -> Iterator[GgufTensor]:
        model, prefix, theirs = self.model, f"layers.{layer}.mixer.", f"blk.{layer}."
        names = {
            "q": "attn_q",
            "k": "attn_k",
            "v": "attn_v",
            "b": "ssm_beta",
            "f_a": "ssm_f_a",
            "f_b": "ssm_f_b",
        }
        names |= {"g_a": "ssm_g_a", "g_b": "ssm_g_b", "norm": "ssm_norm", "out": "attn_output"}
        for ours, name in names.items():
            yield self._own(f"{prefix}{ours}.weight", f"{theirs}{name}.weight")
        for part in "qkv":
            rows, taps = self.shapes[f"{prefix}conv_{part}.weight"]
            yield self._shaped(
                f"{prefix}conv_{part}.weight", f"{theirs}ssm_conv1d_{part}.weight", (1, rows, 1, taps)
            )
        heads = model.linear_num_value_heads
        yield self._shaped(f"{prefix}a_log", f"{theirs}ssm_a", (1, 1, heads, 1), _decay)
        yield self._own(f"{prefix}dt_bias", f"{theirs}ssm_dt.bias")


# ---- factors


def _embedding_factor(model: ModelConfig, architecture: Architecture) -> float:
    return (model.embedding_scale or 1.0) if architecture.embedding_scale == "weights" else 1.0


def query_factor(model: ModelConfig, architecture: Architecture) -> float:
    """Return the factor on queries that gives attention its scale, where the architecture has another."""
    if model.attention_scale is None or architecture.scale or model.kv_lora_rank is not None:
        return 1.0
    return model.attention_scale * sqrt(own_width(model, architecture))


def own_width(model: ModelConfig, architecture: Architecture) -> float:
    """Return the width whose square root divides the scores in llama.cpp: that of a head, but for the largest
    models of Gemma 2 and 3, which it knows by their number of layers."""
    largest = {"gemma2": 46, "gemma3": 62}
    if model.num_hidden_layers == largest.get(architecture.name):
        return model.hidden_size / model.num_attention_heads
    return model.head_size


def _factor(model: ModelConfig, architecture: Architecture, module: str, suffix: str) -> float:
    """Return the factor that is multiplied into a tensor, because the architecture has no key for it."""
    into = model.attention_in_multiplier if suffix == "weight" else 1.0
    gate, down = model.mlp_multipliers or (1.0, 1.0)
    queries = query_factor(model, architecture)
    normed = model.qk_norm != "none"
    factors = {
        "attention.q": into * (1.0 if normed else queries),
        "attention.q_norm": queries,
        "attention.k": into * model.key_multiplier,
        "attention.v": into,
        "attention.out": model.attention_out_multiplier,
        "mlp.gate": gate,
        "mlp.down": down,
    }
    return factors.get(module, 1.0)


# ---- functions of tensors


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _scaled(factor: float = 1.0, offset: float = 0.0, build: Build | None = None) -> Build:
    """Return a function that computes (values + offset) · factor, in at least fp32, of what `build`
    returns."""

    def scaled(*values: Tensor) -> Tensor:
        result = values[0] if build is None else build(*values)
        return result if factor == 1.0 and offset == 0.0 else (_wide(result) + offset) * factor

    return scaled


def _concatenated(factors: tuple[float, ...], *values: Tensor) -> Tensor:
    return torch.cat([_scaled(factor)(each) for factor, each in zip(factors, values, strict=True)])


def _each(builds: tuple[Build, ...], *values: Tensor) -> Tensor:
    return torch.cat([build(each) for build, each in zip(builds, values, strict=True)])


def _reshaped(build: Build | None, shape: Shape) -> Build:
    return lambda *values: (values[0] if build is None else build(*values)).reshape(shape)


@cache
def _inverse(channels: tuple[int, ...]) -> Tensor:
    return torch.tensor(channels).argsort()


def _ordered(channels: tuple[int, ...], values: Tensor) -> Tensor:
    """Return the rows of each head in another order: row `channels[i]` of the result is our row i."""
    return values.unflatten(0, (-1, len(channels)))[:, _inverse(channels)].flatten(0, 1)


def _beside(groups: int, order: Build, first: Tensor, second: Tensor) -> Tensor:
    """Return the rows of two tensors, group by group."""
    parts = [each.unflatten(0, (groups, -1)) for each in (order(first), second)]
    return torch.cat(parts, 1).flatten(0, 1)


def _latent_part(heads: int, key: int, keys: bool, values: Tensor) -> Tensor:
    by_head = values.unflatten(0, (heads, -1))
    return by_head[:, :key].transpose(1, 2).contiguous() if keys else by_head[:, key:].contiguous()


def _expert_part(experts: int, parts: int, number: int, values: Tensor) -> Tensor:
    return values.unflatten(0, (experts, parts, -1))[:, number].contiguous()


def _decay(values: Tensor) -> Tensor:
    return -_wide(values).exp()


def _transposed_heads(
    build: Build, dim: int, first: int, sizes: tuple[int, int, int], *values: Any
) -> Tensor:
    result = build(*values)
    kept, heads = result.narrow(dim, 0, first), result.narrow(dim, first, result.shape[dim] - first)
    turned = heads.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat([kept, turned], dim)
