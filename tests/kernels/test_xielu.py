"""xIELU and its gradients against transformers' formula in float64."""

import pytest
import torch
from megalite_kernels.xielu import xielu_backward, xielu_forward


def theirs(x, alpha_p, alpha_n):
    from transformers.activations import XIELUActivation

    alphas = {"alpha_p": alpha_p, "alpha_n": alpha_n}
    return torch.func.functional_call(XIELUActivation(dtype=x.dtype), alphas, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 3, 22), (1, 2), (0, 8), (129, 260)], ids=str)
def test_as_exact_as_transformers(shape, dtype, as_exact_as):
    x, dh = (3 * torch.randn(*shape)).to(dtype), torch.randn(*shape).to(dtype)
    x.flatten()[:3] = torch.tensor([0.0, -1e-7, -1e-3])[: x.numel()]
    alphas = [torch.tensor([value]).to(dtype) for value in (0.3, -0.9)]
    kept = x.clone(), dh.clone()
    h = xielu_forward(x, *alphas)
    dx, *of_alphas, again = xielu_backward(dh, x, *alphas)
    assert h.dtype == dx.dtype == dtype and torch.equal(h, again)

    def autograd(wide):
        leaves = [each.detach().to(wide).requires_grad_() for each in (x, *alphas)]
        y = theirs(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dh.to(wide))

    torchs, exact = autograd(dtype), autograd(torch.float64)
    as_exact_as(h, torchs[0], exact[0])
    as_exact_as(dx, torchs[1], exact[1])
    small = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, true in zip(of_alphas, exact[2:], strict=True):  # sums of all elements, rounded like fp32
        wide = true.to(torch.promote_types(dtype, torch.float32))
        torch.testing.assert_close(ours, wide, rtol=small, atol=small)
    assert torch.equal(x, kept[0]) and torch.equal(dh, kept[1])
