"""Which tensors kernels take, under each value of train.kernels."""

import sys

import pytest
import torch
from megalite_kernels import backend


class OnGpu:
    """As much of a CUDA tensor as is asked for."""

    is_cuda, is_cpu = True, False
    dtype = torch.bfloat16


@pytest.fixture(autouse=True)
def restored():
    yield
    backend.select("torch")


@pytest.mark.parametrize(
    "kernels, interpreted, cpu, gpu",
    [("auto", "1", False, True), ("torch", "1", False, False), ("triton", "1", True, True)],
)
def test_devices(kernels, interpreted, cpu, gpu, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    backend.select(kernels)
    assert backend.takes_triton(torch.ones(1)) == cpu
    assert backend.takes_triton(OnGpu()) == gpu
    assert not backend.takes_triton(torch.ones(1, dtype=torch.float64))


def test_a_run_with_kernels_needs_a_gpu_or_the_interpreter_and_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="train.kernels=triton requires a GPU, or TRITON_INTERPRET=1"):
        backend.select("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend.select("triton")
    # offloaded state stays with the reference
    assert backend.takes_triton(OnGpu()) and not backend.takes_triton(torch.ones(1))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="the package triton"):
        backend.select("triton")
    backend.select("auto")
    assert not backend.takes_triton(OnGpu())
