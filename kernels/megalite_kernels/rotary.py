"""Rotary position embedding (Su et al. 2021), and the split of a packed q|k|v projection.

The embedding has the half-split form of Hugging Face.

With x = [x1, x2] split at D/2 and angle(s, i) = position(s) · theta^(-2i/D):

    y1 = x1 · cos − x2 · sin        y2 = x2 · cos + x1 · sin

The backward is the rotation by the opposite angle. Pairs that do not rotate have angle 0. Tables are D wide,
with the angles of the D/2 pairs twice, and the first half of the sines negated: a rotation is then

    y = x ∘ cos + [x2, x1] ∘ sin

three operations over whole rows.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.backend import takes_triton


def _llama3(frequency: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Return the frequencies of Llama 3.1.

    Wavelengths beyond the original context are stretched by `factor`, short ones are kept, and those between
    are interpolated.
    """
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = ((context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _yarn(frequency: Tensor, theta: float, scaling: dict[str, Any]) -> Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023).

    Channels that turn at most `beta_slow` times in the original context are stretched by `factor`, those that
    turn at least `beta_fast` times are kept, and the stretch grows linearly over the channels between.
    """
    dim, context = 2 * len(frequency), scaling["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling["beta_fast"]), channel(scaling["beta_slow"])
    if scaling.get("truncate", True):  # to whole channels, as in YaRN's own code; not in gpt-oss
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    channels = torch.arange(len(frequency), device=frequency.device)
    stretch = ((channels - low) / (high - low or 0.001)).clamp(0, 1).to(frequency.dtype)
    return stretch * frequency / scaling["factor"] + (1 - stretch) * frequency


def _longrope(frequency: Tensor, scaling: dict[str, Any], length: int) -> Tensor:
    """Return the frequencies of LongRoPE (Ding et al. 2024).

    Each channel is stretched by its own factor, and by another one in sequences beyond the context.
    """
    is_long = length > scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if is_long else "short_factor"]
    return frequency / _cached_tensor(tuple(factors), frequency.dtype, frequency.device)


@functools.lru_cache(maxsize=16)
def _cached_tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of these values. Cached, since each copy from the host waits for the device."""
    return torch.tensor(values, dtype=dtype, device=device)


def _frequencies(
    head_dim: int,
    theta: float,
    scaling: dict[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device | str,
    length: int,
) -> Tensor:
    scaling = scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    if kind == "dynamic":  # with a fixed alpha, which stretches the base
        theta *= scaling["alpha"] ** (head_dim / (head_dim - 2))
    exponent = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    frequency = 1.0 / theta**exponent  # [D/2]
    if kind in ("default", "dynamic"):
        return frequency
    if kind == "linear":
        return frequency / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequency, scaling)
    if kind == "yarn":
        return _yarn(frequency, theta, scaling)
    if kind == "longrope":
        return _longrope(frequency, scaling, length)
    raise ValueError(
        f"model.rope_scaling: rope_type {kind!r} is not supported. Supported types: default, linear, "
        "llama3, yarn, longrope, dynamic."
    )


def rotary_tables(
    positions: Tensor,
    head_dim: int,
    theta: float,
    scaling: dict[str, Any] | None,
    dtype: torch.dtype,
    device: torch.device | str,
    rotary_dim: int | None = None,
    length: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin: [S, 1, 1, D] for positions [S], [S, B, 1, D] for positions [S, B].

    The first half of the sines is negated. Angles are computed in at least fp32.

    Under YaRN and LongRoPE both are multiplied by an attention_factor, which multiplies scores by its square.

    Args:
        rotary_dim: number of channels that rotate, by default all. Their pairs come first; frequencies are
            those of a head of this width.
        length: length of the sequence, for LongRoPE.
    """
    accumulate_dtype = torch.promote_types(dtype, torch.float32)
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    frequency = _frequencies(rotary_dim, theta, scaling, accumulate_dtype, device, length)
    # [..., rotary_dim/2]
    rows = positions.to(device=device, dtype=accumulate_dtype)
    angle = (rows.unsqueeze(1) if rows.dim() == 1 else rows)[:, :, None, None] * frequency
    factor, idle = (scaling or {}).get("attention_factor", 1.0), (0, (head_dim - rotary_dim) // 2)
    cos, sin = F.pad(angle.cos() * factor, idle, value=1.0), F.pad(angle.sin() * factor, idle)
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate x [S, B, heads, D] by sign · angle, in place."""
    swapped = x.roll(x.shape[3] // 2, 3)
    return x.mul_(cos).addcmul_(swapped, sin, value=sign)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Return x [S, B, heads, D], rotated by its positions' angles.

    With `inverse` it is rotated by the opposite angles, which is the backward.
    """
    if takes_triton(x):
        from megalite_kernels import rotary_triton

        return rotary_triton.rotate_and_pack(x, x[:, :, :0], x[:, :, :0], cos, sin, inverse)
    return _rotate_(x.clone(memory_format=torch.contiguous_format), cos, sin, -1 if inverse else 1)


def split_rotary(
    packed: Tensor,
    hq: int,
    hk: int,
    head_dim: int,
    cos: Tensor | None,
    sin: Tensor | None,
    disposable: bool = False,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection into q, k and v, and rotate q and k.

    [S, B, W], laid out q|k|v|rest -> q [S, B, hq, D], k [S, B, hk, D] and v [S, B, hk, Dv]; the rest stays
    where it is.

    The results are views of one new buffer: `packed` is not kept alive. Without tables (cos is None) nothing
    is rotated, and the results are views of `packed` itself.

    Args:
        disposable: whether the results may be in the memory of `packed`.
        value_dim: Dv; None: D.
    """
    if value_dim is not None and value_dim != head_dim:
        return _split_wide(packed, (hq, hk), (head_dim, value_dim), cos, sin, disposable)
    heads = packed.narrow(2, 0, (hq + 2 * hk) * head_dim).unflatten(2, (hq + 2 * hk, head_dim))
    if cos is not None and sin is not None:
        if takes_triton(packed):
            from megalite_kernels import rotary_triton

            q, k, v = heads.split_with_sizes((hq, hk, hk), 2)
            heads = rotary_triton.rotate_and_pack(q, k, v, cos, sin, False)
        else:
            heads = heads if disposable else heads.clone()
            _rotate_(heads.narrow(2, 0, hq + hk), cos, sin, 1)
    q, k, v = heads.split_with_sizes((hq, hk, hk), 2)
    return q, k, v


def _split_wide(
    packed: Tensor,
    counts: tuple[int, int],
    dims: tuple[int, int],
    cos: Tensor | None,
    sin: Tensor | None,
    disposable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `split_rotary` of values of another width than queries and keys."""
    (hq, hk), (dim, value_dim) = counts, dims
    front, values = packed.narrow(2, 0, (hq + hk) * dim), packed.narrow(2, (hq + hk) * dim, hk * value_dim)
    heads, v = front.unflatten(2, (hq + hk, dim)), values.unflatten(2, (hk, value_dim))
    if cos is not None and sin is not None:
        in_place = disposable and not takes_triton(packed)
        heads = _rotate_(heads, cos, sin, 1) if in_place else rotate(heads, cos, sin)
        v = v if in_place else v.clone(memory_format=torch.contiguous_format)
    q, k = heads.split_with_sizes((hq, hk), 2)
    return q, k, v


def split_rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    drest: Tensor | None = None,
) -> Tensor:
    """Return the gradient of `split_rotary`: one packed [S, B, W].

    Args:
        drest: the gradient of the rest of the projection, [S, B, W − hq·D − hk·(D + Dv)], if there is any.
    """
    dim, rest = dq.shape[3], 0 if drest is None else drest.shape[2]
    wide = dv.shape[3] != dim
    if cos is not None and sin is not None and not wide and takes_triton(dq):
        from megalite_kernels import rotary_triton

        front = rotary_triton.rotate_and_pack(dq, dk, dv, cos, sin, True).flatten(-2)
        return front if drest is None else torch.cat((front, drest), -1)
    if wide or rest % dim:
        return _packed_wide(dq, dk, dv, cos, sin, drest)
    others = () if drest is None else (drest.unflatten(2, (rest // dim, dim)),)
    packed = torch.cat((dq, dk, dv, *others), 2)
    if cos is not None and sin is not None:
        _rotate_(packed.narrow(2, 0, dq.shape[2] + dk.shape[2]), cos, sin, -1)
    return packed.flatten(-2)


def _packed_wide(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None, drest: Tensor | None
) -> Tensor:
    """Return `split_rotary_backward` where not all parts are heads of one width."""
    front = torch.cat((dq, dk), 2)
    if cos is not None and sin is not None:
        front = rotate(front, cos, sin, inverse=True) if takes_triton(dq) else _rotate_(front, cos, sin, -1)
    parts = (front, dv) if drest is None else (front, dv, drest.unsqueeze(-1))
    return torch.cat([part.flatten(-2) for part in parts], -1)
