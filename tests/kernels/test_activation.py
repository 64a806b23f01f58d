import pytest
import torch
import torch.nn.functional as F
from megalite_kernels.activation import gated_backward, gated_forward, plain_backward, plain_forward

TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def gated(x, act):
    gate, up = x.chunk(2, -1)
    return TORCH[act](gate) * up


def autograd(function, x, dh):
    x = x.detach().clone().requires_grad_()
    h = function(x)
    return h.detach(), torch.autograd.grad(h, x, dh.to(h.dtype))[0]


@pytest.mark.parametrize("act", TORCH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 3, 22), (1, 2), (0, 8), (129, 260)], ids=str)
def test_as_torch(act, dtype, shape, as_exact_as):
    x = (3 * torch.randn(*shape)).to(dtype)
    dh = torch.randn(*shape).to(dtype)
    half = dh[..., : shape[-1] // 2]  # not contiguous
    kept = x.clone(), dh.clone()
    cases = (
        (plain_forward(x, act), plain_backward(dh, x, act), TORCH[act], dh),
        (gated_forward(x, act), gated_backward(half, x, act), lambda t: gated(t, act), half),
    )
    for h, (dx, again), function, grad in cases:
        assert h.dtype == dx.dtype == dtype and torch.equal(h, again)
        torchs, exact = autograd(function, x, grad), autograd(function, x.double(), grad)
        as_exact_as(h, torchs[0], exact[0])
        as_exact_as(dx, torchs[1], exact[1])
    assert torch.equal(x, kept[0]) and torch.equal(dh, kept[1])


def test_packed_input_may_have_any_strides():
    x, dh = torch.randn(5, 12, 7).transpose(1, 2), torch.randn(7, 5, 6).transpose(0, 1)
    torch.testing.assert_close(gated_forward(x, "silu"), gated_forward(x.contiguous(), "silu"))
    torch.testing.assert_close(gated_backward(dh, x, "silu"), gated_backward(dh.contiguous(), x.contiguous(), "silu"))


def test_unknown_activation_is_named():
    with pytest.raises(ValueError, match="'swish2'.*silu"):
        plain_forward(torch.ones(1), "swish2")
