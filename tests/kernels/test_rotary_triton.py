"""The rotary kernels against torch and float64."""

import pytest
import torch
from megalite_kernels import rotary
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tables(sequence, batch, dim, dtype, device):
    """Of random positions; `batch` None: the same for every sample."""
    positions = torch.randint(0, 500, (sequence,) if batch is None else (sequence, batch))
    return [table.to(device) for table in rotary.rotary_tables(positions, dim, 1e4, None, dtype, "cpu")]


def by_halves(x, cos, sin):
    """As transformers writes it; the first half of the sines is negated already."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin


def split(packed, hq, hk, dim, cos, sin):
    q, k, v = packed.unflatten(-1, (hq + 2 * hk, dim)).split((hq, hk, hk), 2)
    return by_halves(q, cos, sin), by_halves(k, cos, sin), v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_sample", [False, True], ids=["one table", "a table for each sample"])
@pytest.mark.parametrize("sequence, hq, hk, dim", [(37, 4, 2, 16), (9, 3, 1, 12), (1, 1, 1, 6), (0, 2, 1, 8)])
def test_split_as_accurate_as_torch(dtype, per_sample, sequence, hq, hk, dim, device):
    batch = 3
    cos, sin = tables(sequence, batch if per_sample else None, dim, dtype, device)
    packed = torch.randn(sequence, batch, (hq + 2 * hk) * dim).to(device, dtype).requires_grad_()
    parts = rotary.split_rotary(packed.detach(), hq, hk, dim, cos, sin)
    grads = [torch.randn(part.shape).to(device, dtype) for part in parts]
    grads[0] = grads[0].permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)  # as attention may leave it
    grads[1] = grads[1].transpose(2, 3).contiguous().transpose(2, 3)
    dpacked = rotary.split_rotary_backward(*grads, cos, sin)

    torchs = split(packed, hq, hk, dim, cos, sin)
    wide = packed.detach().double().requires_grad_()
    exact = split(wide, hq, hk, dim, cos.double(), sin.double())
    for got, expected, torch_result in zip(parts, exact, torchs, strict=True):
        assert_as_accurate(got, expected.detach(), torch_result.detach())
    assert torch.equal(parts[2], torchs[2])  # values are copied
    (exact_gradient,) = torch.autograd.grad(exact, wide, [grad.double() for grad in grads])
    assert_as_accurate(dpacked, exact_gradient, torch.autograd.grad(torchs, packed, grads)[0])


@pytest.mark.parametrize("inverse", [False, True])
def test_heads_of_any_strides_are_turned_either_way(inverse, device):
    cos, sin = tables(5, None, 16, torch.float32, device)
    x = torch.randn(2, 3, 16, 5, device=device).permute(3, 0, 1, 2)
    expected = by_halves(x, cos, -sin if inverse else sin)
    for given in (x, x.contiguous(), torch.cat((x, x), -1)[..., :16]):
        torch.testing.assert_close(rotary.rotate(given, cos, sin, inverse), expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy speaks of the infinity
def test_what_is_not_finite_stays_where_it_is(device):
    """A gradient that overflowed must not spread into values that are only copied."""
    cos, sin = tables(2, None, 8, torch.float32, device)
    packed = torch.zeros(2, 1, 3 * 8, device=device)
    packed[0, 0, -1] = torch.inf
    q, k, v = rotary.split_rotary(packed, 1, 1, 8, cos, sin)
    assert (
        torch.isfinite(q).all()
        and torch.isfinite(k).all()
        and (~torch.isfinite(v)).sum() == 1
        and torch.equal(v[0, 0, 0], packed[0, 0, -8:])
    )


def test_operations_are_registered_soundly(device):
    cos, sin = tables(3, None, 8, torch.float32, device)
    q, k, v = (torch.randn(3, 2, heads, 8, device=device) for heads in (2, 1, 1))
    opcheck(torch.ops.megalite.rotate_and_pack.default, (q, k, v, cos, sin, True))
    opcheck(torch.ops.megalite.rotate_and_pack.default, (q, q[:, :, :0], q[:, :, :0], cos, sin, False))


def test_the_compiler_takes_whole_functions(device):
    cos, sin = tables(3, None, 8, torch.float32, device)
    packed = torch.randn(3, 2, 4 * 8, device=device)

    def there_and_back(packed):
        return rotary.split_rotary_backward(*rotary.split_rotary(packed, 2, 1, 8, cos, sin), cos, sin)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(packed)
    assert torch.equal(compiled, there_and_back(packed))
    torch.testing.assert_close(compiled, packed)


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(device, assert_same_bits_and_no_wait):
    cos, sin = tables(4096, None, 128, torch.bfloat16, device)
    packed = torch.randn(4096, 2, 48 * 128, device=device).bfloat16()

    def run():
        parts = rotary.split_rotary(packed, 32, 8, 128, cos, sin)
        return *parts, rotary.split_rotary_backward(*parts, cos, sin)

    assert_same_bits_and_no_wait(run)


def test_values_of_another_width_and_a_narrow_rest(device):
    hq, hk, dim, value_dim, rest = 4, 2, 8, 12, 3
    cos, sin = tables(5, None, dim, torch.float32, device)
    packed = torch.randn(5, 2, (hq + hk) * dim + hk * value_dim + rest, device=device)
    front, values, gate = packed.split(((hq + hk) * dim, hk * value_dim, rest), -1)
    q, k, v = rotary.split_rotary(packed, hq, hk, dim, cos, sin, value_dim=value_dim)
    torch.testing.assert_close(torch.cat((q, k), 2), by_halves(front.unflatten(-1, (-1, dim)), cos, sin))
    assert torch.equal(v.flatten(-2), values)
    torch.testing.assert_close(rotary.split_rotary_backward(q, k, v, cos, sin, gate), packed)
