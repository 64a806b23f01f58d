"""The sum of squares of many ranges, against float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from megalite_kernels import grad_norm_triton
from megalite_kernels.grad_norm import squared_sum
from torch.library import opcheck

from tests.conftest import HAS_GPU

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 64, 4095, 4096, 16, 40_007, 2]


def chunks_of(sizes, dtype, device, gap=16):
    """Ranges of one buffer with something between them that must not count."""
    flat = torch.randn(sum(sizes) + gap * len(sizes)).to(device, dtype)
    parts = flat.split([length for size in sizes for length in (size, gap)])
    for between in parts[1::2]:
        between.fill_(float("nan"))
    return list(parts[::2])


def in_fp64(chunks):
    return sum(chunk.double().square().sum() for chunk in chunks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [SIZES, [64 * n for n in (3, 1000, 64, 129)], [0], [7]], ids=str)
def test_exact_to_fp32_over_ranges_of_any_length(sizes, dtype, device):
    chunks = chunks_of(sizes, dtype, device)
    total = squared_sum(chunks)
    assert total.dtype == torch.float64 and total.shape == () and total.device.type == device
    torch.testing.assert_close(total, in_fp64(chunks) * torch.ones_like(total), rtol=3e-7, atol=0)
    chunks[-1].mul_(2)  # the same addresses, for which a table is known
    torch.testing.assert_close(squared_sum(chunks), in_fp64(chunks) * torch.ones_like(total), rtol=3e-7, atol=0)


def test_digits_are_kept_where_one_fp32_sum_loses_them(device):
    chunk = torch.full((500_000,), 0.1, device=device)
    exact = 500_000 * chunk[0].double().square().item()
    assert abs(squared_sum([chunk]).item() / exact - 1) < 3e-7


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 2e19], ids=str)
@pytest.mark.parametrize("place", [0, 100, 4094, -1])
def test_a_number_that_is_not_finite_makes_the_sum_so(value, place, device):
    for sizes in ([64, 4096], [33, 4097]):
        chunks = chunks_of(sizes, torch.float32, device)
        assert squared_sum(chunks).isfinite()
        chunks[1][place] = value
        assert not squared_sum(chunks).isfinite()


def test_all_ranges_are_one_launch_and_unaligned_ones_another(device, monkeypatch):
    launches = []
    monkeypatch.setattr(
        grad_norm_triton.Variant, "launch", lambda variant, *args: launches.append(variant.constants["ALIGNED"])
    )
    even = chunks_of([64] * 50, torch.float32, device)
    squared_sum(even)
    assert launches == [True]
    squared_sum([*even, *chunks_of([3, 64], torch.float32, device)])
    assert launches[1:] == [True, False]


def test_fp64_and_nothing_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(grad_norm_triton, "squared_sum", None)
    chunk = torch.randn(100, dtype=torch.float64, device=device)
    torch.testing.assert_close(squared_sum([chunk]), in_fp64([chunk]), rtol=1e-14, atol=0)
    assert squared_sum([]).item() == 0.0
    with pytest.raises(TypeError):  # the kernel is what would have been called
        squared_sum([chunk.float()])


@pytest.mark.skipif(HAS_GPU, reason="memory that is never touched costs nothing on a CPU alone")
def test_positions_are_counted_in_64_bits():
    """The tile behind the first 2³¹ elements of a range; in a process of its own, which a wrong address would end."""
    code = """
import torch
from megalite_kernels import grad_norm_triton
variant = grad_norm_triton._variant(torch.bfloat16)
tile = variant.constants["TILE"]
x = torch.empty(2**31 + tile, dtype=torch.bfloat16)
x[-tile:] = 2
sums = torch.zeros(1)
variant.launch((1,), torch.tensor([0], dtype=torch.int32), torch.tensor([[-(2**31 // tile), x.numel(), x.data_ptr()]]), sums)
assert sums.item() == 4 * tile
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


def test_operation_is_registered_soundly(device):
    opcheck(torch.ops.megalite.squared_sum.default, (chunks_of([64, 33], torch.float32, device),))


def test_the_compiler_sees_one_operation(device):
    chunks = chunks_of([64, 33], torch.float32, device)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda chunks: grad_norm_triton.squared_sum(chunks).sqrt(), fullgraph=True, backend=backend
    )
    assert torch.equal(compiled(chunks), squared_sum(chunks).sqrt())
    assert "megalite.squared_sum.default" in [str(node.target) for node in graphs[0].graph.nodes]


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(device, assert_same_bits_and_no_wait):
    chunks = chunks_of([64 * 100_003, 1 << 22, 33, 4096], torch.float32, device)
    assert_same_bits_and_no_wait(lambda: [squared_sum(chunks)])
