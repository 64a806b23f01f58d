"""The causal convolution against its definition, and the gated norms against autograd, in fp64."""

import pytest
import torch
import torch.nn.functional as F
from megalite_kernels import causal_conv, gated_norm
from megalite_kernels.causal_conv import Halo
from torch import Tensor

WIDTH, CHANNELS = 4, 3
# where the documents of twelve tokens start, in two rows; the first three tokens are the halo
STARTS = torch.tensor(
    [[-5, -1], [-5, -1], [-1, -1], [-1, 0], [1, 0], [1, 0], [1, 3], [4, 3], [4, 3], [4, 7], [4, 7], [9, 7]]
)


def by_definition(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor, starts: Tensor | None) -> Tensor:
    padded, outputs = torch.cat((before, x)), []
    for token in range(len(x)):
        out = bias
        for tap in range(WIDTH):
            value = padded[token + tap]
            if starts is not None:
                own = starts[token + tap] == starts[token + WIDTH - 1]
                value = value * own.unsqueeze(-1)
            out = out + weight[:, tap] * value
        outputs.append(out)
    return torch.stack(outputs)


@pytest.mark.parametrize("silu", [False, True], ids=["linear", "silu"])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("halo", [False, True], ids=["from zero", "continued"])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_convolution_is_its_definition(documents, halo, length, silu):
    x, before = (torch.randn(n, 2, CHANNELS, dtype=torch.float64) for n in (length, WIDTH - 1))
    weight, bias = torch.randn(CHANNELS, WIDTH).double(), torch.randn(CHANNELS).double()
    inputs = [each.requires_grad_() for each in (x, weight, bias, before)]
    starts = STARTS[: WIDTH - 1 + length] if documents else None
    expected = by_definition(x, before if halo else torch.zeros_like(before), weight, bias, starts)
    expected = F.silu(expected) if silu else expected
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * dout).sum(), inputs if halo else inputs[:3])
    own = None if starts is None else starts[WIDTH - 1 :]
    past = Halo(before, None if starts is None else starts[: WIDTH - 1]) if halo else None
    with torch.no_grad():
        out = causal_conv.forward(x, weight, bias, starts=own, halo=past, silu=silu)
        ours = causal_conv.backward(dout, x, weight, bias, starts=own, halo=past, silu=silu)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    for gradient, reference in zip(ours, gradients, strict=False):
        torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-12)


def test_what_a_token_does_not_see_may_be_anything():
    """Memory that nothing has written, for example."""
    x = torch.randn(8, 1, CHANNELS)
    weight, starts = torch.randn(CHANNELS, WIDTH), torch.tensor([0] * 3 + [3] * 5).unsqueeze(1)
    expected = causal_conv.forward(x, weight, starts=starts)[3:]
    x[:3] = torch.nan
    assert torch.equal(causal_conv.forward(x, weight, starts=starts)[3:], expected)
    assert torch.isfinite(causal_conv.backward(torch.ones_like(x), x, weight, starts=starts).x[3:]).all()


@pytest.mark.parametrize("by_group", [False, True], ids=["one weight", "a weight for each group"])
@pytest.mark.parametrize("gate", ["silu", "sigmoid", "gate_first"])
def test_gated_norms_and_their_gradients(gate, by_group):
    x, z = (torch.randn(5, 2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn((3, 8) if by_group else (8,), dtype=torch.float64, requires_grad=True)
    inner = x * F.silu(z) if gate == "gate_first" else x
    expected = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + 1e-5) * weight
    if gate != "gate_first":
        expected = expected * (F.silu(z) if gate == "silu" else torch.sigmoid(z))
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * dy).sum(), (x, z, weight))
    with torch.no_grad():
        # in two parts of each group, as two ranks have them
        parts = [slice(0, 3), slice(3, 8)]
        own = [(x[..., part], z[..., part], weight[..., part]) for part in parts]
        summed = sum(gated_norm.squares(a, b, gate) for a, b, _ in own)
        out = [gated_norm.forward(*part, gate, 1e-5, summed, 8, False) for part in own]
        dys = [dy[..., part] for part in parts]
        projected = sum(
            gated_norm.projections(grad, *part, gate, 1e-5, summed, 8) for grad, part in zip(dys, own, strict=True)
        )
        ours = [
            gated_norm.backward(grad, *part, gate, 1e-5, summed, 8, projected)
            for grad, part in zip(dys, own, strict=True)
        ]
    torch.testing.assert_close(torch.cat(out, -1), expected, rtol=1e-13, atol=1e-13)
    for name, reference in zip(("x", "gate", "weight"), gradients, strict=True):
        joined = torch.cat([getattr(part, name) for part in ours], -1)
        torch.testing.assert_close(joined, reference, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        whole = gated_norm.whole_forward(x, z, weight, gate, 1e-5, False)
        together = gated_norm.whole_backward(dy, x, z, weight, gate, 1e-5)
    torch.testing.assert_close(whole, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(tuple(together), gradients, rtol=1e-12, atol=1e-12)
