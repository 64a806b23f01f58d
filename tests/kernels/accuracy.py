"""How near a kernel must come to float64: about as near as torch's own operation of the same dtype. No tolerance is
chosen by hand."""

import torch
from torch import Tensor


def assert_as_accurate(
    got: Tensor, exact: Tensor, torch_result: Tensor, truncations: float = 0, terms: float = 0
) -> None:
    """RMS error at most 1.5 times, largest error at most 3 times that of `torch_result`, and one element may be off by
    a unit in the last place of the largest output; in fp32 on a GPU, where Triton's exp and division are
    approximations, all may. `exact` is the float64 result for the same inputs.

    Args:
        truncations: number of partial sums that a GPU's tensor cores truncate, rather than round, each by at most a
            unit; see `truncated`.
        terms: size of the terms of a result that cancel in exact arithmetic, of which rounding in fp32 is left.
    """
    assert got.dtype == torch_result.dtype and got.shape == exact.shape, f"{got.dtype} {tuple(got.shape)}"
    assert torch.isfinite(got).all()
    if got.numel() == 0:
        return
    unit = torch.finfo(got.dtype).eps * 2.0 ** exact.abs().max().clamp(min=1e-30).log2().floor()
    share = 1.0 if got.is_cuda and got.dtype == torch.float32 else got.numel() ** -0.5
    besides = truncations * unit + terms * torch.finfo(torch.float32).eps
    error, allowed = ((result.double() - exact).abs() for result in (got, torch_result))
    for name, measured, limit in (
        ("rms", error.square().mean().sqrt(), 1.5 * allowed.square().mean().sqrt() + share * unit + besides),
        ("largest", error.max(), 3 * allowed.max() + unit + besides),
    ):
        assert measured <= limit, f"{name} error {measured:.3e} > {limit:.3e}, in {got.dtype}"


def truncated(depth: int, result: Tensor) -> float:
    """Number of truncated sums in a matmul over `depth` products of 16-bit numbers in fp32: a Hopper GPU adds 16
    products at a time, and truncates."""
    return depth / 16 if result.is_cuda else 0
