"""Attention over context-parallel ranks alone, for given q, k and v: its results and the bytes it sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megalite_kernels.attention import attention, attention_backward
from megalite_kernels.dropout import AttentionDropout
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from megalite.mesh.layout import Layout
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.parallel.context.attend import across_rows, attention_over
from megalite.parallel.context.latents import Latents, expanding
from megalite.parallel.context.parts import PARTS, SequencePart, contiguous, split, zigzag

Shape = tuple[int, int, int, int, int]
"""Sequence, batch, heads, key-value heads, channels."""


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, of whole rows."""
    sequence, batch, heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(sequence, batch, each, dim, generator=generator, dtype=torch.float64).to(dtype)
        for each in (heads, kv_heads, kv_heads, heads)
    )


def options_of(shape: Shape, masked: bool) -> dict[str, Any]:
    """Options of the attention operation; masked: with documents, a window, a soft-cap and dropout."""
    sequence, batch, *_ = shape
    options: dict[str, Any] = {"scale": 0.3, "recompute": False}
    options |= {"window": None, "document_start": None, "softcap": None, "dropout": None}
    if masked:
        starts = torch.arange(sequence).div(11, rounding_mode="floor").mul(11).unsqueeze(1).repeat(1, batch)
        starts[:, 0] = 0
        dropout = AttentionDropout(77, torch.arange(5, 5 + batch), 0.2, head_offset=2)
        options |= {"window": 20, "document_start": starts, "softcap": 2.0, "dropout": dropout}
    return options


def whole(shape: Shape, dtype: torch.dtype, masked: bool) -> tuple[Tensor, ...]:
    """out, dq, dk and dv of one process."""
    q, k, v, dout = inputs(shape, dtype)
    options = options_of(shape, masked)
    out, saved = attention(q, k, v, **options)
    return out, *attention_backward(dout, q, k, v, out, saved, **options)


@contextmanager
def counted(axis: MeshAxis | None = None) -> Iterator[list[int]]:
    """Add the bytes that this rank sends, over an axis or all, to the last number of the yielded list."""
    sent, isend = [0], dist.isend

    def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[-1] += x.nbytes if axis is None or kwargs["group"] is axis.group else 0
        return isend(x, *args, **kwargs)

    dist.isend = counting
    try:
        yield sent
    finally:
        dist.isend = isend


def attend(context: Any, method: str, shape: Shape, dtype: torch.dtype, masked: bool, inner: int = 1) -> dict[str, Any]:
    """out, dq, dk and dv of this rank's part, its positions, and the bytes sent by forward and backward."""
    mesh = context.cached(("cp", context.world, inner), lambda: Mesh(Layout(cp=context.world, context_inner=inner)))
    parts = split(PARTS[method](shape[0], context.world // inner), inner)
    places = torch.cat([torch.arange(run.start, run.stop) for run in parts[context.rank]])
    options = options_of(shape, masked)
    starts = options["document_start"]
    part = SequencePart(parts, context.rank, shape[0], starts)
    options |= {"part": part, "document_start": None if starts is None else starts[places]}
    *leaves, dout = (x[places] for x in inputs(shape, dtype))
    leaves = [x.detach().requires_grad_() for x in leaves]
    with counted() as sent:
        out = attention_over(mesh.cp, method, mesh.cp_levels)(*leaves, options)
        sent.append(0)
        out.backward(dout)
    return {"places": places, "tensors": (out.detach(), *(x.grad for x in leaves)), "sent": sent}


def attend_latents(
    context: Any, method: str, tp: int, split_sequence: bool, shape: tuple[int, int, int], dtype: torch.dtype
) -> Any:
    """Bytes that forward and backward send over two cp ranks: latents of 12 channels and shared keys of 4."""
    mesh = context.cached(("cp 2, tp", tp), lambda: Mesh(Layout(cp=2, tp=tp)))
    (sequence, batch, heads), own = shape, shape[0] // 2 // (tp if split_sequence else 1)

    def expand(latent: Tensor, key: Tensor, segments: Any) -> tuple[Tensor, Tensor]:
        keys = torch.cat((latent[..., :8], key), -1)
        return tuple(x.unsqueeze(2).repeat(1, 1, heads // tp, 1) for x in (keys, latent[..., :6]))  # type: ignore[return-value]

    weight: Any = SimpleNamespace(deferred=False, adapter=None, accumulate_as_one=nullcontext)
    part = SequencePart(PARTS[method](sequence, 2), mesh.cp.rank, sequence, None)
    options = options_of((sequence, batch, heads, heads, 12), False) | {"part": part, "expand": expand}
    shapes = (sequence // 2, batch, heads // tp, 12), (own, batch, 12), (own, batch, 4)
    leaves = [torch.randn(each).to(dtype).requires_grad_() for each in shapes]
    with counted(mesh.cp) as sent:
        out = expanding(Latents(mesh.cp, mesh.tp, split_sequence, method == "ring", weight))(*leaves, options)
        sent.append(0)
        out.sum().backward()
    return {"sent": sent}


def recur(
    context: Any,
    by_heads: bool,
    parts: str,
    sequence: int,
    sizes: tuple[int, int, int],
    delta: bool,
    dtype: torch.dtype,
) -> list[int]:
    """Bytes that forward and backward of a recurrence over cp send, with a batch of 2.

    sizes: heads, and the sizes of keys and values; as many key heads.
    """
    mesh = context.cached(("cp", context.world, 1), lambda: Mesh(Layout(cp=context.world)))
    part = SequencePart({"contiguous": contiguous, "zigzag": zigzag}[parts](sequence, context.world), 0, sequence, None)
    rows: Any = SimpleNamespace(document_start=None, part=part._replace(rank=context.rank))
    (heads, dk, dv), own = sizes, (sequence // context.world, 2)
    q, k, v, dout = (torch.randn(*own, heads, width).to(dtype) for width in (dk, dk, dv, dv))
    wide = torch.promote_types(dtype, torch.float32)
    g, beta = -torch.rand(*own, heads).to(wide), torch.rand(*own, heads).to(wide) if delta else None
    tokens, across = Tokens(q, k, v, g, beta), across_rows(mesh.cp, by_heads)
    with counted(mesh.cp) as sent:
        _, kept = across.recur(tokens, rows)
        sent.append(0)
        across.recur_backward(dout, tokens, rows, kept)
    return sent


def shares_a_communicator(context: Any) -> bool:
    """Whether the cp axis uses the group of another axis of the same ranks."""
    mesh = context.cached(("cp", context.world), lambda: Mesh(Layout(cp=context.world)))
    assert mesh.cp.ranks == mesh.data.ranks == mesh.world.ranks
    return any(
        mesh.cp.group is axis.group for axis in (mesh.data, mesh.world, mesh.shard, mesh.stage) if axis is not None
    )
