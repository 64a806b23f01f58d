import pytest
import torch
from megalite_kernels.attention_gate import gate_output, gate_output_backward


@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("width", [12, 3])
def test_is_the_definition(softplus, width):
    """Gates of channels and of heads; beyond 20 torch's softplus is its argument."""
    x = torch.randn(5, 2, 12, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(5, 2, width, dtype=torch.float64).mul_(9).requires_grad_()
    factor = torch.log1p(gate.exp()) if softplus else 1 / (1 + (-gate).exp())
    expected = x * factor.repeat_interleave(12 // width, -1)
    dy = torch.randn_like(x)
    wanted = torch.autograd.grad(expected, (x, gate), dy)
    got = gate_output(x.detach(), gate.detach(), softplus)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(
        gate_output_backward(dy, x.detach(), gate.detach(), softplus), wanted, rtol=1e-8, atol=1e-12
    )
