"""Calls of the attention kernels that come with torch, with an explicit forward and backward.

`attention_routes` says when each one runs.

They do not draw a dropout mask that can be computed again. `FLASH` and `CUDNN` take whole rows, and support
neither windows nor documents. The kernels of variable length take documents by their boundaries: the offsets
of the documents in the tokens of all rows, one row after the other, [documents + 1] int32, and the length of
the longest document. torch.nn.attention.varlen wraps the same kernels in its own autograd.

Published forward and backward speeds in TFLOP/s, H100, 8k keys, 128 channels: cuDNN's 600 and 518
(FlashAttention-3, figures 5 and 6), FlashAttention-2, which is torch's own, 370 and 318, a Triton kernel 392
forward. So cuDNN's comes first on Hopper and Blackwell, FlashAttention-2 elsewhere. By default they do not
sum dq in a fixed order, and their deterministic modes were never tried: a deterministic run does not use
them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class Options(NamedTuple):
    """Options of a call.

    Attributes:
        window: as in `attention`.
        boundaries: offsets and the longest length of the documents; None: rows are whole.
    """

    scale: float
    window: int | None = None
    boundaries: tuple[Tensor, int] | None = None


@dataclass(frozen=True)
class Calls:
    """The two passes of a route.

    q, k, v and out are [S, B, heads, D]; results are contiguous.

    Attributes:
        forward: (q, k, v, options) -> out, and the kernel's own tensors for backward.
        backward: (dout, q, k, v, out, these tensors, options) -> dq, dk, dv.
        prepare: runs before each pass: it makes the kernel known to torch.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...], Options], tuple[Tensor, Tensor, Tensor]
    ]
    prepare: Callable[[], None] = lambda: None


def by_head(x: Tensor) -> Tensor:
    """Return [S, B, heads, D] viewed as [B, heads, S, D]."""
    return x.permute(1, 2, 0, 3)


def _by_position(x: Tensor) -> Tensor:
    """Return the inverse of `by_head`, contiguous."""
    return x.permute(2, 0, 1, 3).contiguous()


def _tokens(x: Tensor) -> Tensor:
    """Return [S, B, heads, D] as [B·S, heads, D], row after row.

    The result is a view if there is one row, else a copy.
    """
    return x.transpose(0, 1).flatten(0, 1)


def _positions(x: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `_tokens`, contiguous: [B·S, heads, D] -> [S, B, heads, D]."""
    sequence, batch = like.shape[:2]
    return x.unflatten(0, (batch, sequence)).transpose(0, 1).contiguous()


# ---- whole rows


def _cudnn(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
    tensors = map(by_head, (q, k, v))
    forward = _aten._scaled_dot_product_cudnn_attention
    results = forward(*tensors, None, True, 0.0, True, False, scale=options.scale)
    # seed and offset: the state of a random generator, which is not used
    out, lse, _, _, _, _, seed, offset, _ = results
    return _by_position(out), (lse, seed, offset)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    (lse, *state), length = saved, q.shape[0]
    # torch caches cuDNN's plan by the strides of q, k and v only: the strides of others must not vary
    dout = dout.contiguous()
    tensors = *map(by_head, (dout, q, k, v, out)), lse
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    dq, dk, dv = backward(*tensors, *state, None, None, None, length, length, 0.0, True, scale=options.scale)
    return _by_position(dq), _by_position(dk), _by_position(dv)


def _flash(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
    tensors = map(by_head, (q, k, v))
    forward = _aten._scaled_dot_product_flash_attention
    out, lse, _, _, _, _, seed, offset, _ = forward(*tensors, 0.0, True, False, scale=options.scale)
    return _by_position(out), (lse, seed, offset)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    (lse, *state), length = saved, q.shape[0]
    tensors = *map(by_head, (dout.contiguous(), q, k, v, out)), lse
    backward = _aten._scaled_dot_product_flash_attention_backward
    dq, dk, dv = backward(*tensors, None, None, length, length, 0.0, True, *state, scale=options.scale)
    return _by_position(dq), _by_position(dk), _by_position(dv)


# ---- documents of any length


def _lengths(options: Options) -> tuple[Tensor, Tensor, int, int]:
    """Return the offsets of queries and of keys, then their longest lengths."""
    assert options.boundaries is not None
    offsets, longest = options.boundaries
    return offsets, offsets, longest, longest


def _reach(options: Options) -> dict[str, int | None]:
    """Return the number of keys that a query sees before and after its own."""
    return {} if options.window is None else {"window_size_left": options.window - 1, "window_size_right": 0}


def _flash_varlen(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, tuple[Tensor, ...]]:
    tensors = map(_tokens, (q, k, v))
    forward = _aten._flash_attention_forward
    out, lse, state, unused, _ = forward(
        *tensors, *_lengths(options), 0.0, True, False, scale=options.scale, **_reach(options)
    )
    return _positions(out, q), (lse, state, unused)


def _flash_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    lse, *state = saved
    tensors = *map(_tokens, (dout.contiguous(), q, k, v, out)), lse
    backward = _aten._flash_attention_backward
    dq, dk, dv = backward(
        *tensors, *_lengths(options), 0.0, True, *state, scale=options.scale, **_reach(options)
    )
    return _positions(dq, q), _positions(dk, q), _positions(dv, q)


@functools.cache
def _activate_fa3() -> None:
    """Let torch's flash operations run FlashAttention-3 from now on."""
    from torch.nn import attention

    attention.activate_flash_attention_impl("FA3")


CUDNN = Calls(_cudnn, _cudnn_backward)
FLASH = Calls(_flash, _flash_backward)
FLASH_VARLEN = Calls(_flash_varlen, _flash_varlen_backward)
FA3 = replace(FLASH, prepare=_activate_fa3)
FA3_VARLEN = replace(FLASH_VARLEN, prepare=_activate_fa3)
