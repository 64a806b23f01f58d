"""What the compile tests compile: all that operations launch at the sizes of real models, and so every entry of the
static tables.

Nothing runs. The operations are called with tensors whose content does not matter, and what they would launch is noted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from megalite_kernels.dropout import AttentionDropout
from megalite_kernels.launch import Variant
from torch import Tensor

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16", FP8: "fp8e4nv"}
NAMES |= {torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}
DTYPES = (BF16, FP16, FP32)
ROWS, BATCH = 3, 2  # neither 1 nor a multiple of 16, which Triton compiles apart
IGNORE_INDEX = -100
EPS = 1e-5
HEADS = ((8, 64, 1536), (32, 128, 6144))  # how many, their width, and that of the projection in which they lie

HeadCase = tuple[tuple[int, int], str]
"""Channels of keys and of values, and the options of attention."""
EVERYTHING = "softcap window documents dropout"
HEAD_CASES: tuple[HeadCase, ...] = (
    *(((64, 64), EVERYTHING), ((80, 80), EVERYTHING), ((256, 256), EVERYTHING), ((192, 128), EVERYTHING)),
    *(((64, 64), "documents"), ((128, 128), "documents"), ((192, 128), "documents"), ((192, 192), "documents")),
)
"""Every tile: with all options, in one loop over the keys; and with documents alone, in two (the heads of Llama 1B and
8B, DeepSeek-V3)."""
ALL_HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
NORM_WIDTHS = {
    "rms norm": [2048, 8192, 16384],
    "add + rms norm": [2048, 4096, 5120, 8192, 9216, 12288, 16384],
    "layer norm": [768, 8192],
}
ALL_WIDTHS = (768, 1536, 2048, 2304, 3072, 4096, 5120, 6144, 7168, 8192, 9216, 10240, 12288, 14336, 16384)

Calls = Iterator[tuple[tuple[str, ...], Callable[[], Any]]]
"""A call, and before it the names of what it launches; an empty one: another call launches the same."""


class Launch(NamedTuple):
    """One binary: a variant, called `name` in its module, and the arguments that it is launched with."""

    name: str
    variant: Variant
    args: tuple[Any, ...]

    def seen_by_triton(self) -> tuple[dict[str, str], list[str]]:
        """The type of each argument that is no constant, and which are multiples of 16, so that loads become wide. (The
        interpreter's kernels do not know the second.)"""
        types, aligned = {}, []
        taken = [parameter for parameter in self.variant.kernel.params if parameter.name not in self.variant.constants]
        for parameter, given in zip(taken, self.args, strict=True):
            if isinstance(given, Tensor):
                kind, number = f"*{NAMES[given.dtype]}", given.data_ptr()
            else:
                kind, number = "fp32" if isinstance(given, float) else "i32", given
            types[parameter.name] = kind
            if kind != "fp32" and not parameter.do_not_specialize:
                assert number != 1, f"{self.name}: Triton makes a constant of {parameter.name} = 1"
                aligned += [parameter.name] if number % 16 == 0 else []
        return types, aligned


def of_activation(module: Any) -> Calls:
    """Limited by memory alone, and the same on every architecture; so are most of the others."""
    for act, kind in (("silu", "silu"), ("gelu_new", "gelu")):
        for dtype in DTYPES:
            h, gate_up = torch.empty(ROWS, 14336, dtype=dtype), torch.empty(ROWS, 2 * 14336, dtype=dtype)
            label = f"{kind} {NAMES[dtype]}, 256 columns"
            yield (f"gated forward {label}",), partial(module.gated_forward, gate_up, act)
            yield (f"gated backward {label}",), partial(module.gated_backward, h, gate_up, act)


def of_adamw(module: Any) -> Calls:
    """Training in fp32, bf16 and fp16."""
    for grads, weights in (FP32, None), (FP32, BF16), (BF16, BF16), (FP32, FP16):
        for scale in (None, torch.ones(())):
            params, gradients, *moments = ([torch.empty(64, dtype=dtype)] for dtype in (FP32, grads, FP32, FP32))
            masters = [torch.empty(64, dtype=weights)] if weights else []
            named = f", masters of {NAMES[weights]}" if weights else ""
            name = f"adamw {NAMES[grads]} gradients{named}{'' if scale is None else ', scaled'}"
            yield (name,), partial(module.adamw, params, gradients, *moments, masters, scale, *[0.5] * 6)


def heads_of(dim: int, value_dim: int) -> tuple[Tensor, ...]:
    """q, k, v and the output."""
    shapes = (8, dim), (2, dim), (2, value_dim), (8, value_dim)
    return tuple(torch.empty(ROWS, BATCH, heads, width, dtype=BF16) for heads, width in shapes)


def channels(dim: int, value_dim: int) -> str:
    return f"{dim} channels" if dim == value_dim else f"{dim} and {value_dim} channels"


def of_attention(module: Any, cases: Iterable[HeadCase] = HEAD_CASES) -> Calls:
    starts, samples = torch.zeros(ROWS, BATCH, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64)
    for dims, kind in cases:
        masks = (
            1024 if "window" in kind else None,
            starts if "documents" in kind else None,
            30.0 if "softcap" in kind else None,
        )
        options = (*masks, samples, 7, 0.1, 0, 0) if "dropout" in kind else (*masks, None, 0, 0.0, 0, 0)
        q, k, v, out = heads_of(*dims)
        lse, label = torch.empty(BATCH, 8, ROWS), f"bf16 {channels(*dims)} {kind}"
        yield (f"forward {label}",), partial(module.flash_attention, q, k, v, dims[0] ** -0.5, *options)
        call = partial(module.flash_attention_backward, out, q, k, v, out, lse, dims[0] ** -0.5, *options)
        yield (f"dq {label}", f"dk dv {label}"), call


def of_attention_part(module: Any, cases: Iterable[HeadCase] = HEAD_CASES) -> Calls:
    """The same, for two runs on each side."""
    starts, dropout = (
        torch.zeros(ROWS, BATCH, dtype=torch.int64),
        AttentionDropout(7, torch.zeros(BATCH, dtype=torch.int64), 0.1),
    )
    for dims, kind in cases:
        masks = (
            1024 if "window" in kind else None,
            starts if "documents" in kind else None,
            30.0 if "softcap" in kind else None,
        )
        options = *masks, dropout if "dropout" in kind else None
        q, k, v, out = heads_of(*dims)
        lse, label, runs = torch.empty(ROWS, BATCH, 8), f"bf16 {channels(*dims)} {kind}, runs", ((0, 2), (9, 1))
        yield (
            (f"forward {label}",),
            partial(module.flash_attention_part, q, k, v, runs, runs, dims[0] ** -0.5, *options),
        )
        call = partial(
            module.flash_attention_part_backward, out, q, k, v, lse, lse, runs, runs, dims[0] ** -0.5, *options
        )
        yield (f"dq {label}", f"dk dv {label}"), call


def of_dropout(module: Any) -> Calls:
    """An activation; its width is only a number to the kernel."""
    samples, positions = torch.zeros(BATCH, dtype=torch.int64), torch.zeros(ROWS, 1, dtype=torch.int64)
    for dtype in DTYPES:
        x = torch.empty(ROWS, BATCH, 4096, dtype=dtype)
        yield (f"dropout {NAMES[dtype]}, 256 columns",), partial(module.dropout, x, 7, samples, positions, 0.1, 0)


def of_cross_entropy(module: Any) -> Calls:
    """Padded vocabularies."""
    targets, lse, scale = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(2, ROWS), torch.ones(())
    for dtype in DTYPES:
        logits, label = torch.empty(ROWS, 1024, dtype=dtype), f"{NAMES[dtype]}, rows in steps of 8"
        part = (0, 1000, IGNORE_INDEX)
        yield (f"statistics {label}",), partial(module.cross_entropy_statistics, logits, targets, *part, False)
        yield (f"statistics with sum {label}",), partial(module.cross_entropy_statistics, logits, targets, *part, True)
        for kind, factor in (("gradient", scale), ("gradient, a factor for each token,", scale.expand(ROWS))):
            yield (
                (f"{kind} {label}",),
                partial(module.cross_entropy_gradient_, logits, targets, lse, factor, *part, 0.1, 0.1, 1000),
            )


def of_fp8(module: Any) -> Calls:
    x = torch.empty(ROWS, 4096, dtype=BF16)
    for power_of_two in (False, True):
        kind = "powers of two" if power_of_two else "fp32 scales"
        yield (f"quantize 1 x 128, {kind}",), partial(module.quantize, x, 1, power_of_two)
        weight = torch.empty(128, 4096, dtype=BF16)
        yield (f"quantize 128 x 128, {kind}",), partial(module.quantize, weight, 128, power_of_two)
        yield (f"quantize 128 x 1, {kind}",), partial(module.quantize_tokens, x[: ROWS // 128 * 128], power_of_two)
    yield ("quantize 1 x 32",), partial(module.quantize_mx, x)


def of_block_matmul(module: Any) -> Calls:
    table = torch.empty(16)
    for form, codes, block in (("nf4", 2, 64), ("int8", 1, 0), ("mxfp4", 2, 32)):
        for dtype in (BF16, FP16):
            packed, scales = (
                torch.empty(4096 * 1024 // codes, dtype=torch.uint8),
                torch.empty(4096, 1024 // (block or 1024)),
            )
            matrix = packed, scales, table, form, block
            label = f"{form}, {NAMES[dtype]}"
            yield (f"x W, {label}",), partial(module.block_matmul, torch.empty(ROWS, 1024, dtype=dtype), *matrix)
            call = partial(module.block_transposed_matmul, torch.empty(ROWS, 4096, dtype=dtype), *matrix)
            yield (f"dy W, {label}",), call


def of_fp8_matmul(module: Any) -> Calls:
    a, b = torch.empty(ROWS, 4096, dtype=FP8), torch.empty(256, 4096, dtype=FP8)
    scales, b_scales, ends = torch.empty(ROWS, 32), torch.empty(2, 32), torch.empty(2, dtype=torch.int32)
    yield ("matmul 1 x 128 by 128 x 128",), partial(module.fp8_matmul, a, scales, b, b_scales, BF16)
    both = torch.empty(2, 4096, 256, dtype=FP8).transpose(1, 2), torch.empty(2, 32, 2).transpose(1, 2)
    yield ("matmul of groups, transposed",), partial(module.fp8_matmul, a, scales, *both, BF16, ends)


def of_fp8_mx_matmul(module: Any) -> Calls:
    a, b, ends = torch.empty(ROWS, 4096, dtype=FP8), torch.empty(2, 256, 4096, dtype=FP8), torch.empty(2).int()
    scales, b_scales = (torch.empty(*shape, 128, dtype=torch.float8_e8m0fnu) for shape in ((ROWS,), (2, 256)))
    yield ("matmul 1 x 32",), partial(module.fp8_mx_matmul, a, scales, b[0], b_scales[0], BF16)
    yield ("matmul 1 x 32 of groups",), partial(module.fp8_mx_matmul, a, scales, b, b_scales, BF16, ends)


def of_fp8_weight_grad(module: Any) -> Calls:
    """Of 256 rows."""
    left, right = torch.empty(1024, 256, dtype=FP8).t(), torch.empty(4096, 256, dtype=FP8).t()
    operands = left, torch.empty(2, 1024), right, torch.empty(2, 4096)
    for name, experts, ends in (("a matrix", 1, None), ("experts", 2, torch.empty(2, dtype=torch.int32))):
        grad = torch.empty(experts, 1024, 4096, device="meta")
        yield (f"weight gradient of {name}",), partial(module.add_fp8_gradient, grad, *operands, ends, False)


def of_gated_norm(module: Any) -> Calls:
    """A head's values (Qwen3-Next, Kimi), groups of Nemotron-H, one group of Falcon-H1."""
    for gate, groups, width, by_group, dtype in (
        ("silu", 32, 128, False, BF16),
        ("sigmoid", 32, 128, False, BF16),
        ("gate_first", 8, 1024, True, BF16),
        ("gate_first", 1, 6144, True, BF16),
        ("silu", 32, 128, False, FP32),
        ("gate_first", 8, 1024, True, FP16),
        ("gate_first", 1, 4096, True, FP32),
    ):
        x = torch.empty(ROWS, BATCH, groups, width, dtype=dtype)
        z = torch.empty(ROWS, BATCH, 3 * groups * width, dtype=dtype)[..., : groups * width].view_as(x)
        weight = torch.empty((groups, width) if by_group else (width,), dtype=dtype)
        label = f"{gate} {NAMES[dtype]}, {width} wide{', by group' if by_group else ''}"
        yield (f"forward {label}",), partial(module.gated_norm_forward, x, z, weight, gate, EPS, True)
        yield (f"backward {label}",), partial(module.gated_norm_backward, x, x, z, weight, gate, EPS)


def of_grad_norm(module: Any) -> Calls:
    for dtype in DTYPES:
        chunks = [torch.empty(64, dtype=dtype)]
        yield (f"squared sum {NAMES[dtype]}",), partial(module.squared_sum, chunks)


def of_norm(module: Any) -> Calls:
    """The widths of real models, the widest that `norm` gives to kernels, and short and odd ones."""
    cases = [(kind, BF16, torch.empty(ROWS, width), 0.0) for kind, of_kind in NORM_WIDTHS.items() for width in of_kind]
    wide = torch.empty(ROWS, 8192)
    cases += [
        ("add + rms norm", FP16, torch.empty(ROWS, 4096), 0.0),
        ("add + rms norm", FP32, wide, 0.0),
        ("layer norm", FP32, wide, 0.0),
    ]
    heads = [
        torch.empty(ROWS, BATCH, packed)[..., : count * width].unflatten(-1, (count, width))
        for count, width, packed in HEADS
    ]
    cases += [("rms norm", BF16, each, 0.0) for each in heads] + [
        ("add + rms norm", BF16, torch.empty(ROWS, 3072), 1.0),
        ("add + bare rms norm", BF16, torch.empty(ROWS, 2048), 0.0),
        ("bare rms norm", BF16, heads[0], 0.0),
    ]
    yield from norms(module, cases)


def norms(module: Any, cases: Iterable[tuple[str, torch.dtype, Tensor, float]]) -> Calls:
    """cases: the norm, its dtype, a tensor of its shape and strides, and the offset of its weight; a bare one has
    none."""
    for kind, dtype, like, offset in cases:
        x = torch.empty_strided(like.shape, like.stride(), dtype=dtype)
        weight = None if "bare" in kind else torch.empty(x.shape[-1], dtype=dtype)
        statistic = torch.empty(*x.shape[:-1], 1)
        second, (bias, mean) = (
            x if kind[:3] == "add" else None,
            (weight, statistic) if kind[:5] == "layer" else (None, None),
        )
        special = (f", {x.shape[-2]} heads" if x.dim() > 2 else "") + (f", offset {offset:g}" if offset else "")
        label = f"{NAMES[dtype]}, {x.shape[-1]} wide{special}"
        yield (f"{kind} forward {label}",), partial(module.norm_forward, x, second, weight, bias, 1e-5, offset, True)
        yield (
            (f"{kind} backward {label}",),
            partial(module.norm_backward, x, second, x, weight, mean, statistic, offset),
        )


def of_rotary(module: Any) -> Calls:
    for dtype in DTYPES:
        for dim in (64, 96, 128):
            q, k, v = torch.empty(ROWS, BATCH, 10, dim, dtype=dtype).split((6, 2, 2), 2)
            table = torch.empty(ROWS, 1, 1, dim, dtype=dtype)
            yield (
                (f"rotary {NAMES[dtype]}, {dim} channels",),
                partial(module.rotate_and_pack, q, k, v, table, table, False),
            )


def of_ordered_sum(module: Any) -> Calls:
    """Gradients reduced in bf16."""
    for dtype in (FP32, BF16):
        yield (
            (f"ordered sum of bf16 in {NAMES[dtype]}",),
            partial(module.ordered_sum, torch.empty(8, 4096, dtype=BF16), torch.empty(4096, dtype=dtype)),
        )


def of_permutation(module: Any) -> Calls:
    """Rows of experts, with two for each token."""
    index, order = torch.zeros(ROWS, 2, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    weights = torch.empty(ROWS, 2)
    for dtype in (BF16, FP32):
        rows, label = torch.empty(ROWS, 4096, dtype=dtype), f"{NAMES[dtype]}, 4 KB of a row"
        yield (f"rows gathered {label}",), partial(module.gather_rows, rows, order)
        yield (f"rows combined {label}",), partial(module.combine_rows, rows, index, weights)
        yield (f"rows summed {label}",), partial(module.combine_rows, rows, index, None)
        yield (f"rows combined, backward {label}",), partial(module.combine_rows_backward, rows, rows, order, weights)


def of_grouped_weight_grad(module: Any) -> Calls:
    """The input matrices of Mixtral's experts."""
    left, right = torch.empty(ROWS, 2 * 14336, dtype=BF16), torch.empty(ROWS, 4096, dtype=BF16)
    grad, ends = torch.empty(2, 2 * 14336, 4096, device="meta"), torch.zeros(2, dtype=torch.int32)
    yield ("weight gradients of experts bf16",), partial(module.add_grouped_gradient, grad, left, right, ends, False)


def of_causal_conv(module: Any) -> Calls:
    """The channels of Qwen3-Next, of a part of Nemotron-H, and of LFM2's gated convolution."""
    starts = torch.zeros(ROWS, BATCH, dtype=torch.int64)
    for channels, width, dtype, documents, bias, silu in (
        (8192, 4, BF16, None, False, True),
        (8192, 4, BF16, starts, True, True),
        (2048, 3, BF16, starts, False, False),
        (8192, 4, FP16, starts, True, True),
        (8192, 4, FP32, starts, True, True),
    ):
        x, dout = (torch.empty(ROWS, BATCH, wide, dtype=dtype) for wide in (3 * channels, channels))
        weight, halo = torch.empty(channels, width, dtype=dtype), torch.empty(width - 1, BATCH, channels, dtype=dtype)
        past = None if documents is None else documents[: width - 1]
        options = weight[:, 0] if bias else None, documents, halo, past, silu
        label = f"{NAMES[dtype]}, {width} weights{' and bias' if bias else ''}"
        label += "" if documents is None else " documents"
        yield (f"forward {label}",), partial(module.causal_conv_forward, x[..., :channels], weight, *options)
        yield (f"backward {label}",), partial(module.causal_conv_backward, dout, x[..., :channels], weight, *options)


def of_recurrence(module: Any) -> Calls:
    """Qwen3-Next, Kimi, Nemotron-H; and keys of the most channels, which need other scans."""
    every = "prepare scan outputs within adjoint pairs gradients"
    starts = torch.zeros(ROWS, BATCH, dtype=torch.int64)
    for kind, key_heads, heads, dk, dv, listed in (
        ("delta", 16, 32, 128, 128, every),
        ("delta", 4, 4, 256, 256, "scan adjoint"),
        ("delta by channel", 32, 32, 128, 128, "prepare scan outputs within adjoint gradients"),
        ("mamba", 8, 128, 128, 64, "scan adjoint pairs gradients"),
    ):
        q = torch.empty(ROWS, BATCH, key_heads, dk, dtype=BF16)
        v = torch.empty(ROWS, BATCH, heads, dv, dtype=BF16)
        g = torch.empty(ROWS, BATCH, heads, dk) if "channel" in kind else torch.empty(ROWS, BATCH, heads)
        beta, state = None if kind == "mamba" else torch.empty(ROWS, BATCH, heads), torch.empty(BATCH, heads, dk, dv)
        inputs, solved = (q, q, v, g, beta, starts), () if beta is None else ("prepare",)

        def named(names: Iterable[str], label: str, listed: str = listed) -> tuple[str, ...]:
            return tuple(f"{name} {label}" if name in listed.split() else "" for name in names)

        label = f"{kind} bf16 {channels(dk, dv)} documents"
        call = partial(module.recurrence_forward, *inputs, state)
        yield named((*solved, "scan", "outputs"), label), call
        again = ("",) * (len(solved) + 1)
        call = partial(module.recurrence_backward, v, *inputs, state, state)
        yield again + named(("within", "adjoint", "pairs", "gradients"), label), call


def of_index_scores(module: Any) -> Calls:
    """DeepSeek-V3.2 and GLM-5."""
    positions, rows = torch.zeros(ROWS, BATCH, dtype=torch.int64), 4096
    order = torch.zeros(rows, BATCH, dtype=torch.int64)
    selection = torch.zeros(ROWS, BATCH, 2048, dtype=torch.int32)
    for heads in (64, 32):
        q, k = torch.empty(ROWS, BATCH, heads, 128, dtype=BF16), torch.empty(rows, BATCH, 128, dtype=BF16)
        w, label = torch.empty(ROWS, BATCH, heads), f"bf16 {heads} heads"
        for tables, kind in ((None, None), ""), ((order, positions), " documents, rows in any order"):
            for exact in (True, False):
                name = f"scores of all rows in {'fp64' if exact else 'fp32'} {label}{kind}"
                yield (name,), partial(module.index_scores_select, q, k, w, 2048, positions, *tables, exact)
        yield (f"selected scores {label}",), partial(module.index_scores_selected, q, k, w, selection)
        call = partial(module.index_scores_selected_backward, torch.empty(selection.shape), q, k, w, selection)
        yield (f"gradients {label}", "", ""), call


def of_selected_rows(module: Any) -> Calls:
    """Gradients of an indexer's keys, and of latents."""
    selection = torch.zeros(ROWS, BATCH, 2048, dtype=torch.int32)
    for heads, width, values in (64, 128, 0), (128, 576, 512), (16, 576, 512):
        x, y = (torch.empty(ROWS, BATCH, heads, wide, dtype=BF16) for wide in (width, values))
        factors, total = torch.empty(ROWS, BATCH, heads, 2048, dtype=BF16), torch.zeros(ROWS, BATCH, 1, width)
        label = f"bf16 {heads} heads, {f'{width} and {values}' if values else width} channels"
        names = f"products {label}", f"sum of parts, {width} channels" if heads != 16 else ""
        yield names, partial(module.add, total, factors, x, selection, *((factors, y) if values else ()))


def of_sparse_attention(module: Any) -> Calls:
    """Latents, for all heads of DeepSeek-V3.2 and for those of one of eight ranks; and keys of each head."""
    selection = torch.zeros(ROWS, BATCH, 2048, dtype=torch.int32)
    for heads, groups, dim, width in (128, 1, 576, 512), (16, 1, 576, 512), (16, 16, 192, 128):
        q, keys = torch.empty(ROWS, BATCH, heads, dim, dtype=BF16), torch.empty(ROWS, BATCH, groups, dim, dtype=BF16)
        out, lse = torch.empty(ROWS, BATCH, heads, width, dtype=BF16), torch.empty(ROWS, BATCH, heads)
        values = None if groups == 1 else torch.empty(ROWS, BATCH, groups, width, dtype=BF16)
        label = f"bf16 {heads} heads, {f'{groups} of keys, ' if groups > 1 else ''}{channels(dim, width)}"
        inputs = q, keys, values
        yield (f"forward {label}",), partial(module.sparse_attention_forward, *inputs, width, selection, 0.1)
        call = partial(module.sparse_attention_backward, out, *inputs, out, lse, selection, 0.1)
        yield (f"backward {label}", *[""] * (2 if groups == 1 else 4)), call
        call = partial(module.sparse_attention_probabilities, q, keys, selection, lse, 0.1)
        yield (f"probabilities {label}",), call


LISTS = {
    "activation_triton": of_activation,
    "adamw_triton": of_adamw,
    "attention_part_triton": of_attention_part,
    "attention_triton": of_attention,
    "block_matmul_triton": of_block_matmul,
    "causal_conv_triton": of_causal_conv,
    "cross_entropy_triton": of_cross_entropy,
    "dropout_triton": of_dropout,
    "fp8_matmul_triton": of_fp8_matmul,
    "fp8_mx_matmul_triton": of_fp8_mx_matmul,
    "fp8_triton": of_fp8,
    "fp8_weight_grad_triton": of_fp8_weight_grad,
    "gated_norm_triton": of_gated_norm,
    "grad_norm_triton": of_grad_norm,
    "grouped_weight_grad_triton": of_grouped_weight_grad,
    "index_scores_triton": of_index_scores,
    "norm_triton": of_norm,
    "ordered_sum_triton": of_ordered_sum,
    "permutation_triton": of_permutation,
    "recurrence_triton": of_recurrence,
    "rotary_triton": of_rotary,
    "selected_rows_triton": of_selected_rows,
    "sparse_attention_triton": of_sparse_attention,
}


def long_list() -> dict[str, tuple[str, Callable[[Any], Calls]]]:
    """The long form, by name: a module and calls of it. Attention with every set of options, and norms of every
    width."""
    attention = {"attention_triton": of_attention, "attention_part_triton": of_attention_part}
    names = EVERYTHING.split()
    kinds = [" ".join(chosen) for count in range(len(names) + 1) for chosen in combinations(names, count)]
    lists: dict[str, tuple[str, Callable[[Any], Calls]]] = {
        f"{module}/{channels(*dims)} {kind or 'causal'}": (module, partial(calls, cases=[(dims, kind or "causal")]))
        for module, calls in attention.items()
        for dims in ALL_HEADS
        for kind in kinds
    }
    for width, dtype in product(ALL_WIDTHS, DTYPES):
        like, most = torch.empty(ROWS, width), 32768 // dtype.itemsize
        cases = [(kind, dtype, like, offset) for kind in ("rms norm", "add + rms norm") for offset in (0.0, 1.0)]
        cases += [("layer norm", dtype, like, 0.0)] if width <= 8192 else []
        if width <= most:
            lists[f"norm_triton/{width} wide {NAMES[dtype]}"] = ("norm_triton", partial(norms, cases=cases))
    return lists


def launches(module_name: str, architecture: str, calls: Callable[[Any], Calls] | None = None) -> list[Launch]:
    """What a module launches on GPUs of an architecture: at the calls of its list."""
    module, launched = importlib.import_module(f"megalite_kernels.{module_name}"), list[Launch]()
    functions = dict.fromkeys(("architecture", "fp8_architecture"), lambda device: architecture)
    with patch.multiple(module, create=True, **functions):
        for names, call in (calls or LISTS[module_name])(module):
            seen: list[tuple[Variant, tuple[Any, ...]]] = []
            with patch.object(Variant, "launch", lambda variant, grid, *args, into=seen: into.append((variant, args))):
                call()
            launched += [Launch(name, *launch) for name, launch in zip(names, seen, strict=True) if name]
    return launched
