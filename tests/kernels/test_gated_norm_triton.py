"""The gated norms' kernels against torch and float64."""

import pytest
import torch
import torch.nn.functional as F
from megalite_kernels import gated_norm, gated_norm_triton
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate

EPS = 1e-5


def by_autograd(x, z, weight, dy, gate):
    """y and the gradients, by torch in the inputs' dtype."""
    x, z, weight = (t.detach().requires_grad_() for t in (x, z, weight))
    inner = x * F.silu(z) if gate == "gate_first" else x
    y = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + EPS) * weight
    if gate != "gate_first":
        y = y * (F.silu(z) if gate == "silu" else torch.sigmoid(z))
    return y.detach(), *torch.autograd.grad(y, (x, z, weight), dy)


@pytest.mark.parametrize(
    ("shape", "by_group", "dtype"),
    [
        ((70, 1, 2, 64), False, torch.bfloat16),
        ((3, 2, 3, 300), True, torch.float16),
        ((9, 2, 96), True, torch.float32),
        ((1, 1, 1, 5000), False, torch.bfloat16),
        ((0, 2, 16), True, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("gate", ["silu", "sigmoid", "gate_first"])
def test_as_accurate_as_torch(gate, shape, by_group, dtype, device):
    x, dy = (torch.randn(shape).to(device, dtype) for _ in range(2))
    packed = torch.randn(*shape[:-2], 3 * shape[-2], shape[-1]).to(device, dtype)
    z = packed[..., shape[-2] : 2 * shape[-2], :]  # a part of a projection
    weight = torch.randn(shape[-2:] if by_group else shape[-1:]).to(device, dtype)
    got = (
        gated_norm.whole_forward(x, z, weight, gate, EPS, False),
        *gated_norm.whole_backward(dy, x, z, weight, gate, EPS),
    )
    torchs = by_autograd(x, z, weight, dy, gate)
    exact = by_autograd(*(t.double() for t in (x, z, weight, dy)), gate)
    assert got[3].dtype == torch.float32 and gated_norm_triton._rows_of(z)[0].data_ptr() == z.data_ptr()
    for ours, torch_result, true in zip((*got[:3], got[3].to(dtype)), torchs, exact, strict=True):
        assert_as_accurate(ours, true, torch_result)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", ["silu", "gate_first"])
def test_rounded_where_the_reference_rounds(gate, weights, device, monkeypatch):
    x, z = torch.randn(2, 64, 2, 32, device=device).bfloat16()
    weight = torch.randn(32, device=device, dtype=weights)
    y = gated_norm.whole_forward(x, z, weight, gate, EPS, True)
    expected = gated_norm.forward(x, z, weight, gate, EPS, gated_norm.squares(x, z, gate), 32, True)
    assert y.dtype == torch.bfloat16
    assert (y != expected).float().mean() < 0.02  # but for the order of a sum
    assert not torch.equal(y, gated_norm.whole_forward(x, z, weight, gate, EPS, False))


def test_fp64_and_wide_groups_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(gated_norm_triton, "gated_norm_forward", None)
    for dtype, width in ((torch.float64, 8), (torch.bfloat16, 8193)):
        x = torch.ones(1, width, dtype=dtype, device=device)
        gated_norm.whole_forward(x, x, x[0], "silu", EPS, False)
    with pytest.raises(TypeError):  # the kernel is what would have been called
        x = torch.ones(1, 8192, dtype=torch.bfloat16, device=device)
        gated_norm.whole_forward(x, x, x[0], "silu", EPS, False)


def test_operations_are_registered_soundly(device):
    x, z, dy = torch.randn(3, 5, 2, 16, device=device)
    for weight in (torch.randn(16, device=device), torch.randn(2, 16, device=device)):
        opcheck(torch.ops.megalite.gated_norm_forward.default, (x, z, weight, "silu", EPS, True))
        opcheck(torch.ops.megalite.gated_norm_backward.default, (dy, x, z, weight, "gate_first", EPS))
