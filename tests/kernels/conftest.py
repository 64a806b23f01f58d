"""Makes `megalite_kernels` importable from the source tree, and holds what its tests share."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

from megalite_kernels import backend

from tests.conftest import HAS_GPU
from tests.kernels import compiling

# Triton exists on Linux alone
collect_ignore_glob = [] if sys.platform == "linux" else ["test_*_triton.py", "test_compiling.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU the tests of kernels run there: `-m gpu` takes them too."""
    for item in items:
        if HAS_GPU and "_kernels_run" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@pytest.fixture
def as_exact_as() -> Callable[..., None]:
    """Asserts that `ours` is as near to the fp64 `exact` as torch's own result of the same dtype: RMS error ≤ factor ×
    torch's + 1 ulp. In fp64, where that error is not known, agreement within 1e-12 of the largest element."""

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


@pytest.fixture
def assert_same_bits_and_no_wait() -> Callable[[Callable[[], Sequence[Tensor]]], None]:
    """Asserts that ten calls of a function give the same bits, and that the host waits for the GPU in none after the
    first."""

    def check(run: Callable[[], Sequence[Tensor]]) -> None:
        first = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            others = [run() for _ in range(9)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, other) for results in others for one, other in zip(first, results, strict=True))

    return check


@pytest.fixture(scope="session")
def binaries(request: pytest.FixtureRequest) -> compiling.Binaries:
    """What the compiler made of every kernel for every architecture, and of every launch for one."""
    assert request.config.cache is not None
    return compiling.compile_covering(request.config.cache.mkdir("triton"))


@pytest.fixture(scope="session")
def _kernels_run() -> str:
    """Where kernels run: on the GPU, or interpreted on the CPU."""
    if HAS_GPU:
        return "cuda"
    from tests.kernels.interpreter import repair

    repair()
    return "cpu"


@pytest.fixture
def device(_kernels_run: str) -> Iterator[str]:
    """Operations on tensors of this device run their kernels."""
    backend.select("triton")
    yield _kernels_run
    backend.select("torch")
