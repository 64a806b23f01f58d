import pytest
import torch
import torch.nn.functional as F
from megalite_kernels.norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from torch import Tensor

SHAPES = [(5, 3, 64), (1, 37), (0, 16), (257, 96), (4, 1), (3, 8192), (4096, 24)]


def llama_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """transformers' LlamaRMSNorm; with an offset GemmaRMSNorm, which multiplies before the cast."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.to(wide.dtype))).to(x.dtype) if offset else weight * normed.to(x.dtype)


def autograd(function, tensors, dy):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape, dtype, offset, as_exact_as):
    x, weight, dy = (torch.randn(*s).to(dtype) for s in (shape, shape[-1:], shape))
    ours_y, rstd = rms_norm(x, weight, 1e-5, offset)
    dx, dweight = rms_norm_backward(dy, x, weight, rstd, offset)
    reference = autograd(lambda x, w: llama_norm(x, w, 1e-5, offset), (x, weight), dy)
    exact = autograd(lambda x, w: llama_norm(x, w, 1e-5, offset), (x.double(), weight.double()), dy)
    assert ours_y.dtype == dx.dtype == dtype and rstd.dtype == dweight.dtype == torch.promote_types(
        dtype, torch.float32
    )
    for ours, torchs, true in zip((ours_y, dx, dweight), reference, exact, strict=True):
        as_exact_as(ours, torchs, true)


@pytest.mark.parametrize("shape", [(5, 3, 64), (0, 16), (257, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_weights(shape, dtype, as_exact_as):
    x, dy, dtotal = (torch.randn(*shape).to(dtype) for _ in range(3))
    y, rstd = rms_norm(x, None, 1e-5, 1.0)  # whatever the offset
    dx, dweight = rms_norm_backward(dy, x, None, rstd, 1.0)
    centered, mean, layer_rstd = layer_norm(x, None, None, 1e-5)
    layer_dx, *others = layer_norm_backward(dy, x, None, mean, layer_rstd)
    assert dweight is None and others == [None, None]
    for got, function in (
        ((y, dx), lambda x: F.rms_norm(x, shape[-1:], eps=1e-5)),
        ((centered, layer_dx), lambda x: F.layer_norm(x, shape[-1:], eps=1e-5)),
    ):
        for ours, torchs, true in zip(
            got, autograd(function, (x,), dy), autograd(function, (x.double(),), dy), strict=True
        ):
            as_exact_as(ours, torchs, true)
    assert torch.equal(rms_norm_backward(dy, x, None, rstd, dtotal=dtotal)[0], dx + dtotal)


# of one element LayerNorm leaves rounding noise
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[-1] > 1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_layer_norm(shape, dtype, offset, as_exact_as):
    x, weight, bias, dy = (torch.randn(*s).to(dtype) for s in (shape, shape[-1:], shape[-1:], shape))
    y, mean, rstd = layer_norm(x, weight, bias, 1e-5, offset)
    gradients = layer_norm_backward(dy, x, weight, mean, rstd, offset)
    reference = autograd(lambda *t: F.layer_norm(t[0], shape[-1:], t[1] + offset, t[2], 1e-5), (x, weight, bias), dy)
    exact = autograd(
        lambda *t: F.layer_norm(t[0], shape[-1:], t[1] + offset, t[2], 1e-5),
        (x.double(), weight.double(), bias.double()),
        dy,
    )
    torch.testing.assert_close(
        layer_norm(x, weight, None, 1e-5, offset)[0], layer_norm(x, weight, 0 * bias, 1e-5, offset)[0]
    )
    assert gradients[1].dtype == gradients[2].dtype == mean.dtype == torch.promote_types(dtype, torch.float32)
    for ours, torchs, true in zip((y, *gradients), reference, exact, strict=True):
        as_exact_as(ours, torchs, true)


def test_inputs_may_have_any_strides_and_are_not_written():
    x, dy = torch.randn(6, 40, 5).transpose(1, 2), torch.randn(5, 6, 80)[..., ::2].transpose(0, 1)
    weight = torch.randn(40)
    copies = x.clone(), dy.clone(), weight.clone()
    y, rstd = rms_norm(x, weight, 1e-5)
    dx, dweight = rms_norm_backward(dy, x, weight, rstd)
    dense = rms_norm(x.contiguous(), weight, 1e-5)
    torch.testing.assert_close(y, dense[0])
    torch.testing.assert_close((dx, dweight), rms_norm_backward(dy.contiguous(), x.contiguous(), weight, dense[1]))
    assert all(torch.equal(a, b) for a, b in zip(copies, (x, dy, weight), strict=True))


def test_small_and_large_inputs_stay_finite():
    weight = torch.ones(64)
    for scale in (0.0, 1e-15, 1e15):
        x = torch.randn(3, 64) * scale
        y, rstd = rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(y, llama_norm(x, weight, 1e-6, 0.0))
        assert torch.isfinite(rms_norm_backward(torch.randn(3, 64), x, weight, rstd)[0]).all()
