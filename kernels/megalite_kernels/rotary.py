"""Rotary position embedding (Su et al. 2021), and the split of a packed q|k|v projection.

The embedding has the half-split form of Hugging Face.

With x = [x1, x2] split at D/2 and angle(s, i) = position(s) · theta^(-2i/D):

    y1 = x1 · cos − x2 · sin        y2 = x2 · cos + x1 · sin

The backward is the rotation by the opposite angle. Pairs that do not rotate have angle 0. Tables are D wide,
with the angles of the D/2 pairs twice, as in transformers: a rotation is then one multiplication over whole
rows and two over half rows, which is faster than four over half rows.
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
    exponent = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    frequency = 1.0 / theta**exponent  # [D/2]
    scaling = scaling or {"rope_type": "default"}
    kind = scaling["rope_type"]
    if kind == "default":
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
        "llama3, yarn, longrope."
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
    """Return cos and sin: [S, D] for positions [S], [S, B, D] for positions [S, B].

    Angles are computed in at least fp32.

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
    angle = positions.to(device=device, dtype=accumulate_dtype).unsqueeze(-1) * frequency
    factor, idle = (scaling or {}).get("attention_factor", 1.0), (0, (head_dim - rotary_dim) // 2)
    cos, sin = F.pad(angle.cos() * factor, idle, value=1.0), F.pad(angle.sin() * factor, idle)
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((sin, sin), -1).to(dtype)


def _rotate_into(y: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    """Write x rotated by sign · angle to y; both [S, B, heads, D]; y must not overlap x."""
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # [S, 1 or B, 1, D]
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=y)
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Return x [S, B, heads, D], rotated by its positions' angles.

    With `inverse` it is rotated by the opposite angles, which is the backward.
    """
    if takes_triton(x):
        from megalite_kernels import rotary_triton

        return rotary_triton.rotate_and_pack(x, x[:, :, :0], x[:, :, :0], cos, sin, inverse)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate_into(y, x, cos, sin, -1 if inverse else 1)
    return y


def split_rotary(
    packed: Tensor, hq: int, hk: int, head_dim: int, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed projection into q, k and v, and rotate q and k.

    [S, B, (hq + 2·hk)·D], laid out q|k|v -> q [S, B, hq, D], k and v [S, B, hk, D].

    The results are views of one new buffer: `packed` is not kept alive. Without tables (cos is None) nothing
    is rotated, and the results are views of `packed` itself.
    """
    heads = packed.unflatten(-1, (hq + 2 * hk, head_dim))
    if cos is not None and sin is not None and takes_triton(packed):
        from megalite_kernels import rotary_triton

        q, k, v = heads.split((hq, hk, hk), 2)
        heads = rotary_triton.rotate_and_pack(q, k, v, cos, sin, False)
    elif cos is not None and sin is not None:
        source, heads = heads, torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        _rotate_into(heads[:, :, : hq + hk], source[:, :, : hq + hk], cos, sin, 1)
        heads[:, :, hq + hk :].copy_(source[:, :, hq + hk :])
    return heads[:, :, :hq], heads[:, :, hq : hq + hk], heads[:, :, hq + hk :]


def split_rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """Return the gradient of `split_rotary`: one packed [S, B, (hq + 2·hk)·D], each part written once."""
    if cos is not None and sin is not None and takes_triton(dq):
        from megalite_kernels import rotary_triton

        return rotary_triton.rotate_and_pack(dq, dk, dv, cos, sin, True).flatten(-2)
    sequence, batch, hq, head_dim = dq.shape
    hk = dk.shape[2]
    packed = torch.empty(sequence, batch, hq + 2 * hk, head_dim, dtype=dq.dtype, device=dq.device)
    for gradient, part in ((dq, packed[:, :, :hq]), (dk, packed[:, :, hq : hq + hk])):
        if cos is not None and sin is not None:
            _rotate_into(part, gradient, cos, sin, -1)
        else:
            part.copy_(gradient)
    packed[:, :, hq + hk :].copy_(dv)
    return packed.flatten(-2)
