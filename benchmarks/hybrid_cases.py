"""Cases of hybrid layers for `tools/benchmark.py kernels`.

They are the causal convolution, the gated norms and the recurrences, at the shapes of Qwen3-Next, Kimi Linear
and Nemotron-H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from megalite_kernels import backend, causal_conv, gated_norm, recurrence
from megalite_kernels.gated_norm import Gate
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from benchmarks.kernel_cases import (
    EAGER,
    EPS,
    Contest,
    Function,
    KernelCase,
    Sizes,
    both_ways,
    forwards,
    times_limit,
)

CHUNK = 64  # of the FLOPs of a recurrence, whatever a kernel does


def cases(sizes: Sizes) -> Iterable[KernelCase]:
    yield from _convolution(sizes)
    yield from _gated_norm(sizes, "silu", sizes.of(32, 2), sizes.of(128, 16))
    yield from _gated_norm(sizes, "gate_first", sizes.of(8, 2), sizes.of(1024, 32))
    width = sizes.of(128, 16)
    yield from _recurrence(sizes, "delta", sizes.of(16, 1), sizes.of(32, 2), width, width)
    yield from _recurrence(sizes, "delta by channel", sizes.of(32, 1), sizes.of(32, 1), width, width)
    yield from _recurrence(sizes, "mamba", sizes.of(8, 1), sizes.of(128, 2), width, sizes.of(64, 16))


def _convolution(sizes: Sizes) -> Iterable[KernelCase]:
    count, channels, taps = sizes.of(16384, 8), sizes.of(8192, 32), 4

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        return sizes.randn(count, 1, channels), sizes.randn(channels, taps), sizes.randn(channels)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        padded = F.pad(x.permute(1, 2, 0), (taps - 1, 0))
        return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)).permute(2, 0, 1)

    def make_forward() -> Contest:
        own = inputs()
        return Contest(lambda: causal_conv.forward(*own), forwards(torchs, own))

    def make_backward() -> Contest:
        own, dout = inputs(), sizes.randn(count, 1, channels)
        return Contest(lambda: causal_conv.backward(dout, *own), both_ways(torchs, own, (dout,)))

    shape, element, module = (
        f"{count} × {channels} bf16, {taps} weights",
        2 * count * channels,
        "causal_conv_triton",
    )
    limit = (times_limit(1.25),)
    yield KernelCase(
        "causal convolution, forward", shape, make_forward, 2 * element, targets=limit, module=module
    )
    yield KernelCase(
        "causal convolution, backward", shape, make_backward, 3 * element, targets=limit, module=module
    )


def _gated_norm(sizes: Sizes, gate: Gate, groups: int, width: int) -> Iterable[KernelCase]:
    count, by_group = sizes.of(16384, 8), gate == "gate_first"

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        x, z = sizes.randn(count, 1, groups, width), sizes.randn(count, 1, groups, width)
        return x, z, sizes.randn(groups, width) if by_group else sizes.randn(width)

    def torchs(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        act = F.silu(z.float())
        inner = x.float() * act if by_group else x.float()
        normed = F.rms_norm(inner, (width,), None, EPS) * weight
        return (normed if by_group else normed * act).to(x.dtype)

    def make_forward() -> Contest:
        own = inputs()
        return Contest(lambda: gated_norm.whole_forward(*own, gate, EPS, False), forwards(torchs, own))

    def make_backward() -> Contest:
        own, dy = inputs(), sizes.randn(count, 1, groups, width)
        return Contest(lambda: gated_norm.whole_backward(dy, *own, gate, EPS), both_ways(torchs, own, (dy,)))

    shape, element = f"{count} × {groups} × {width} bf16", 2 * count * groups * width
    name, module, limit = f"gated norm, {gate}", "gated_norm_triton", (times_limit(1.25),)
    yield KernelCase(f"{name}, forward", shape, make_forward, 3 * element, targets=limit, module=module)
    yield KernelCase(f"{name}, backward", shape, make_backward, 5 * element, targets=limit, module=module)


def by_torch(function: Callable[[], object]) -> Function:
    """Return a function of the reference in torch."""

    def run() -> object:
        backend.select("torch")
        try:
            return function()
        finally:
            backend.select("triton")

    return run


def _recurrence(
    sizes: Sizes, kind: str, key_heads: int, heads: int, dk: int, dv: int
) -> Iterable[KernelCase]:
    count = sizes.of(16384, 8)

    def inputs() -> tuple[Tokens, Tensor]:
        q, k = (F.normalize(sizes.randn(count, 1, key_heads, dk), dim=-1) for _ in range(2))
        shape = (count, 1, heads, dk) if kind == "delta by channel" else (count, 1, heads)
        decay = -torch.rand(shape, device=sizes.device) / 8
        beta = None if kind == "mamba" else torch.rand(count, 1, heads, device=sizes.device)
        return Tokens(q, k, sizes.randn(count, 1, heads, dv), decay, beta), sizes.randn(count, 1, heads, dv)

    def make_forward() -> Contest:
        tokens, _ = inputs()
        peers = {EAGER: lambda: by_torch(lambda: recurrence.forward(tokens))}
        return Contest(lambda: recurrence.forward(tokens), peers)

    def make_backward() -> Contest:
        tokens, dout = inputs()
        peers = {EAGER: lambda: by_torch(lambda: recurrence.backward(dout, tokens))}
        return Contest(lambda: recurrence.backward(dout, tokens), peers)

    if kind == "mamba":
        forward = 2 * CHUNK * (dv + dk * key_heads / heads) + 4 * dk * dv
        backward = 2 * forward
    else:
        forward = CHUNK * (6 * dk + 4 * dv) + 6 * dk * dv + CHUNK**2
        backward = CHUNK * (14 * dk + 8 * dv) + 12 * dk * dv + 4 * CHUNK**2
    shape, each = f"{count} × ({key_heads} × {dk} | {heads} × {dv}) bf16", count * heads
    module = "recurrence_triton"
    yield KernelCase(f"recurrence, {kind}, forward", shape, make_forward, flops=each * forward, module=module)
    yield KernelCase(
        f"recurrence, {kind}, backward", shape, make_backward, flops=each * backward, module=module
    )
