"""Makes `megalite_kernels` importable from the source tree, and holds the comparison that its tests share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@pytest.fixture
def as_exact_as() -> Callable[..., None]:
    """Asserts that `ours` is as near to the fp64 `exact` as torch's own result of the same dtype: RMS error ≤ factor × torch's + 1 ulp.
    In fp64, where that error is not known, agreement within 1e-12 of the largest element."""

    def check(ours: Tensor, torchs: Tensor, exact: Tensor, factor: float = 1.5) -> None:
        assert ours.shape == exact.shape
        assert torch.isfinite(ours).all()
        if ours.dtype == torch.float64:
            largest = exact.abs().max().item() if exact.numel() else 0.0
            return torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12 * largest)
        ulp = torch.finfo(torchs.dtype).eps * _rms(exact)
        error, allowed = _rms(ours.double() - exact), factor * _rms(torchs.double() - exact) + ulp
        assert error <= allowed, f"rms error {error:.2e} > {allowed:.2e}"

    return check
