"""The convolution's kernels against torch and float64."""

import pytest
import torch
from megalite_kernels import backend, causal_conv
from megalite_kernels.causal_conv import Halo
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def starts_of(length, rows):
    """Documents of a few tokens; the first one began before the first token."""
    starts = torch.full((length, rows), -9)
    for row in range(rows):
        for position in (torch.rand(length) < 0.2).nonzero().flatten().tolist():
            starts[position:, row] = position
    return starts


def references(dout, x, weight, bias, **options):
    """Outputs and gradients by torch in the inputs' dtype, and exact."""
    backend.select("torch")
    results = []
    for double in (False, True):
        dout, x, weight, bias = (t if t is None or not double else t.double() for t in (dout, x, weight, bias))
        halo = options["halo"]
        if double and halo is not None:
            halo = Halo(halo.x.double(), halo.starts)
        kept = {**options, "halo": halo}
        results.append(
            (
                causal_conv.forward(x, weight, bias, **kept),
                *causal_conv.backward(dout, x, weight, bias, **kept),
            )
        )
    backend.select("triton")
    return results


@pytest.mark.parametrize(
    ("length", "batch", "channels", "width", "halo", "documents", "bias", "silu", "dtype"),
    [
        (1, 2, 24, 4, True, "each", False, True, torch.bfloat16),
        (2, 2, 24, 4, False, "each", True, True, torch.float32),
        (40, 2, 70, 3, True, "one row", True, False, torch.float16),
        (270, 1, 24, 4, True, "each", True, True, torch.bfloat16),
        (33, 1, 24, 2, True, "none", False, False, torch.bfloat16),
        (20, 1, 24, 4, False, "none", False, True, torch.bfloat16),
    ],
)
def test_as_accurate_as_torch(length, batch, channels, width, halo, documents, bias, silu, dtype, device):
    packed, dout = (torch.randn(length, batch, n).to(device, dtype) for n in (3 * channels, channels))
    x = packed[..., channels : 2 * channels]
    weight, shift = torch.randn(channels, width).to(device, dtype), torch.randn(channels).to(device, dtype)
    padded = None
    if documents != "none":
        padded = starts_of(length + width - 1, 1 if documents == "one row" else batch).to(device) - (width - 1)
    past = None
    if halo:
        before = torch.randn(width - 1, batch, channels).to(device, dtype)
        past = Halo(before, None if padded is None else padded[: width - 1])
    options = {"starts": None if padded is None else padded[width - 1 :], "halo": past, "silu": silu}
    own_bias = shift if bias else None
    got = (
        causal_conv.forward(x, weight, own_bias, **options),
        *causal_conv.backward(dout, x, weight, own_bias, **options),
    )
    torchs, exact = references(dout, x, weight, own_bias, **options)
    for ours, torch_result, true in zip(got, torchs, exact, strict=True):
        assert (ours is None) == (true is None)
        if ours is not None:
            assert_as_accurate(ours, true, torch_result)


def test_what_a_token_does_not_see_is_not_loaded(device, monkeypatch):
    """It may be memory that nothing has written; and all of the results are written."""
    kept = torch.Tensor.new_empty

    def poisoned(*args, **options):
        new = kept(*args, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    x = torch.randn(40, 1, 16, device=device)
    weight, starts = torch.randn(16, 4, device=device), torch.tensor([0] * 3 + [3] * 37, device=device).unsqueeze(1)
    expected = causal_conv.forward(x, weight, starts=starts)
    assert torch.isfinite(expected).all()
    gradients = causal_conv.backward(torch.ones_like(x), x, weight, starts=starts)
    assert all(torch.isfinite(each).all() for each in gradients if each is not None)
    x[:3] = torch.nan
    assert torch.equal(causal_conv.forward(x, weight, starts=starts)[3:], expected[3:])
    assert torch.isfinite(causal_conv.backward(torch.ones_like(x), x, weight, starts=starts).x[3:]).all()


def test_operations_are_registered_soundly(device):
    x, dout = torch.randn(2, 5, 1, 16, device=device)
    weight, bias, halo = (torch.randn(*shape, device=device) for shape in ((16, 4), (16,), (3, 1, 16)))
    for last in ((bias, None, halo, None, True), (None, torch.zeros(5, 1, dtype=torch.int64), None, None, False)):
        opcheck(torch.ops.megalite.causal_conv_forward.default, (x, weight, *last))
        opcheck(torch.ops.megalite.causal_conv_backward.default, (dout, x, weight, *last))
