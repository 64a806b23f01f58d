"""Attention cases of `tools/benchmark.py kernels`: our flash attention and the kernels included in torch.

FLOPs count visible (query, key) pairs: 4 · pairs · channels · heads forward, 2.5 times as many backward.
Every peer uses its fastest layout, [batch, heads, sequence, channels].
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megalite_kernels import attention
from torch import Tensor

from benchmarks.kernel_cases import Contest, Function, KernelCase, Sizes, Target, backward_of

TOKENS = 16384  # per batch, for every sequence length


@dataclass(frozen=True)
class AttentionCase:
    """One attention call."""

    length: int
    dim: int
    heads: int
    kv_heads: int
    batch: int
    window: int | None = None
    document: int | None = None  # tokens of each document

    @property
    def shape(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        masks = (f", window {self.window}" if self.window else "") + (
            f", documents of {self.document}" if self.document else ""
        )
        return f"{self.batch} × {self.length}, {heads} heads × {self.dim} bf16{masks}"

    @property
    def flops(self) -> float:
        """Return the FLOPs of the forward."""
        reach = self.document or self.length
        pairs = reach * (reach + 1) / 2  # per document
        if self.window and self.window < reach:
            pairs -= (reach - self.window) * (reach - self.window + 1) / 2
        return 4.0 * pairs * (self.length // reach) * self.batch * self.heads * self.dim

    def starts(self, device: str) -> Tensor | None:
        """Return the start of each token's document, [length, batch]."""
        if self.document is None:
            return None
        position = torch.arange(self.length, device=device)
        return (position // self.document * self.document).unsqueeze(1).expand(-1, self.batch).contiguous()

    def inputs(self, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v as views of one packed projection, as in the model."""
        packed = sizes.randn(self.length, self.batch, self.heads + 2 * self.kv_heads, self.dim)
        return packed.split((self.heads, self.kv_heads, self.kv_heads), 2)


def cases(sizes: Sizes) -> Iterable[KernelCase]:
    """Yield the cases. There are none if the kernel does not exist."""
    if importlib.util.find_spec("megalite_kernels.attention_triton") is None:
        return
    for problem in _problems(sizes.smoke):
        first = problem.length == 8192 and problem.dim == 128 and problem.kv_heads == problem.heads
        plain = problem.window is None and problem.document is None
        fast = Target("TFLOP/s", lambda row: row["tflops"], 400, at_most=False)
        tuned = first and plain or sizes.smoke or (problem.dim == 64 and problem.length == 8192)
        names, module = (
            {"forward": ("_forward",), "backward": ("_backward_queries", "_backward_keys")},
            "attention_triton",
        )
        yield KernelCase(
            "flash attention, forward", problem.shape, _forward(sizes, problem), flops=problem.flops,
            targets=(fast,) if first and plain else (), module=module,
                tuned=names["forward"] if tuned else (),
        )  # fmt: skip
        yield KernelCase(
            "flash attention, backward", problem.shape, _backward(sizes, problem), flops=2.5 * problem.flops,
            module=module, tuned=names["backward"] if tuned else (),
        )  # fmt: skip


def _problems(smoke: bool) -> Iterable[AttentionCase]:
    if smoke:
        yield AttentionCase(32, 16, 2, 1, 1, window=8)
        return
    for length in (8192, 2048, 16384):
        for dim in (128, 64):
            yield AttentionCase(length, dim, 2048 // dim, 2048 // dim, TOKENS // length)
    yield AttentionCase(8192, 128, 32, 8, 2)
    yield AttentionCase(8192, 128, 32, 8, 2, window=1024)
    yield AttentionCase(8192, 128, 32, 8, 2, document=2048)


def _options(problem: AttentionCase, starts: Tensor | None) -> tuple[Any, ...]:
    """Return scale, window, document_start and softcap, without dropout."""
    return problem.dim**-0.5, problem.window, starts, None, None, 0, 0.0, 0, 0


def _forward(sizes: Sizes, problem: AttentionCase) -> Callable[[], Contest]:
    def make() -> Contest:
        own = importlib.import_module("megalite_kernels.attention_triton")
        q, k, v = problem.inputs(sizes)
        options = _options(problem, problem.starts(sizes.device))
        theirs = _theirs(q, k, v)
        peers: dict[str, Callable[[], Function]] = {
            name: partial(_called, build_peer, theirs) for name, build_peer in _peers(problem, sizes).items()
        }
        peers["as routed"] = lambda: partial(attention.attention, q, k, v, **_routed(problem, options[2]))
        return Contest(lambda: own.flash_attention(q, k, v, *options), peers)

    return make


def _backward(sizes: Sizes, problem: AttentionCase) -> Callable[[], Contest]:
    def make() -> Contest:
        own = importlib.import_module("megalite_kernels.attention_triton")
        q, k, v = problem.inputs(sizes)
        options = _options(problem, problem.starts(sizes.device))
        out, lse = own.flash_attention(q, k, v, *options)
        dout = torch.randn_like(out)
        theirs, their_grad = _theirs(q, k, v), dout.permute(1, 2, 0, 3).contiguous()
        peers: dict[str, Callable[[], Function]] = {
            name: partial(_gone_back, build_peer, theirs, their_grad)
            for name, build_peer in _peers(problem, sizes).items()
        }
        peers["as routed"] = lambda: _routed_backward(q, k, v, dout, _routed(problem, options[2]))
        return Contest(lambda: own.flash_attention_backward(dout, q, k, v, out, lse, *options), peers)

    return make


def _routed(problem: AttentionCase, starts: Tensor | None) -> dict[str, Any]:
    return {"scale": problem.dim**-0.5, "window": problem.window, "document_start": starts}


def _routed_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: dict[str, Any]) -> Function:
    out, saved = attention.attention(q, k, v, **options)
    return lambda: attention.attention_backward(dout, q, k, v, out, saved, **options)


def _theirs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))


def _called(make: Callable[[], Callable[..., Tensor]], inputs: tuple[Tensor, ...]) -> Function:
    return partial(make(), *inputs)


def _gone_back(
    make: Callable[[], Callable[..., Tensor]], inputs: tuple[Tensor, ...], grad: Tensor
) -> Function:
    return backward_of(make(), inputs, (grad,))


def _peers(problem: AttentionCase, sizes: Sizes) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Return factories of functions of q, k, v [batch, heads, sequence, channels]."""
    from torch.nn.attention import SDPBackend

    grouped = problem.heads != problem.kv_heads
    if sizes.smoke:
        return {}
    peers: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "flex_attention": lambda: _flex(problem, sizes.device)
    }
    if problem.window is None and problem.document is None:
        peers["SDPA flash"] = lambda: _sdpa(SDPBackend.FLASH_ATTENTION, grouped)
        peers["SDPA cuDNN"] = lambda: _sdpa(SDPBackend.CUDNN_ATTENTION, grouped)
    return peers


def _sdpa(backend: Any, grouped: bool) -> Callable[..., Tensor]:
    from torch.nn.attention import sdpa_kernel

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return call


def _flex(problem: AttentionCase, device: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    starts, window = problem.starts(device), problem.window

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if window is not None:
            seen = seen & (query - key < window)
        if starts is not None:
            seen = seen & (key >= starts[query, 0])
        return seen

    mask = create_block_mask(visible, None, None, problem.length, problem.length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=problem.heads != problem.kv_heads)
