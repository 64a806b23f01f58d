"""The AdamW kernel against torch's fused one and float64, over ranges of flat buffers."""

from __future__ import annotations

import pytest
import torch
from megalite_kernels import adamw_triton, backend, ranges_triton
from megalite_kernels.adamw import adamw_
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate
from tests.support.device_rules import DEVICE, ON_DEVICE, DeviceRules

OPTIONS = {"lr": 0.013, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.3}
WHOLE = [64, 4096, 2048 + 64]  # as shards are cut: multiples of 64 elements
ODD = [1, 33, 0, 2049]
DTYPES = [
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
]
GAP = 16  # elements between two ranges, which nothing may touch


def ranges(sizes, dtype, device, values=torch.randn):
    """Ranges of one buffer, one behind the other, and the gaps between them."""
    flat = values(sum(sizes) + GAP * len(sizes)).to(device, dtype)
    parts = flat.split([length for size in sizes for length in (size, GAP)])
    return list(parts[::2]), list(parts[1::2])


def steps(arrays, gradients, grad_scale, first=1):
    for step, grads in enumerate(gradients, first):
        adamw_(arrays[0], grads, *arrays[1:], step=step, grad_scale=grad_scale, **OPTIONS)


@pytest.mark.parametrize("scale", [None, 3.7])
@pytest.mark.parametrize("grads, weights", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [WHOLE, ODD], ids=["whole", "odd"])
def test_steps_are_as_accurate_as_those_of_torch(sizes, grads, weights, scale, device):
    wide = torch.float32
    cut = [
        ranges(sizes, dtype, device, values)
        for dtype, values in ((wide, torch.randn), (wide, torch.zeros), (wide, torch.zeros))
    ]
    cut += [ranges(sizes, weights, device)] if weights else []
    ours, gaps = [parts for parts, _ in cut], [[gap.clone() for gap in gaps] for _, gaps in cut]
    torchs, exact = ([[x.clone().to(dtype) for x in array] for array in ours[:3]] for dtype in (wide, torch.float64))
    gradients = [ranges(sizes, grads, device)[0] for _ in range(3)]
    kept = [[x.clone() for x in each] for each in gradients]
    divisor = None if scale is None else torch.tensor(scale, device=device)
    steps(ours, gradients, divisor)
    assert all(torch.equal(x, y) for pair in zip(gradients, kept, strict=True) for x, y in zip(*pair, strict=True))
    backend.select("torch")
    steps(torchs, [[x.float() for x in each] for each in kept], divisor)
    steps(exact, [[x.double() for x in each] for each in kept], divisor)
    for got, right, reference in zip(ours, exact, torchs, strict=False):
        assert_as_accurate(torch.cat(got), torch.cat(right), torch.cat(reference))
    if weights:
        assert all(torch.equal(weight, param.to(weights)) for weight, param in zip(ours[3], ours[0], strict=True))
    assert all(
        torch.equal(x, y)
        for (_, after), before in zip(cut, gaps, strict=True)
        for x, y in zip(after, before, strict=True)
    )


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("grads, weights", DTYPES, ids=str)
def test_a_divisor_of_nan_changes_nothing(grads, weights, kernels, device):
    backend.select(kernels)
    arrays = [ranges(WHOLE, torch.float32, device, values)[0] for values in (torch.randn, torch.randn, torch.rand)]
    arrays += [ranges(WHOLE, weights, device)[0]] if weights else []
    if weights:
        for weight, param in zip(arrays[3], arrays[0], strict=True):
            weight.copy_(param)
    before = [[x.clone() for x in array] for array in arrays]
    gradient = [x.fill_(torch.inf) for x in ranges(WHOLE, grads, device)[0]]
    steps(arrays, [gradient], torch.tensor(torch.nan, device=device))
    assert all(
        torch.equal(x, y) for now, then in zip(arrays, before, strict=True) for x, y in zip(now, then, strict=True)
    )


def test_a_decay_of_a_millionth_is_not_rounded_away(device):
    """In fp32, 1 − 1e-6 is off by 5 % of what it takes off: multiplied by that, parameters would decay too slowly or
    too fast."""
    before = torch.rand(2048, device=device) + 1
    p, zeros = before.clone(), [torch.zeros(2048, device=device) for _ in range(3)]
    for step in range(1, 21):
        adamw_([p], zeros[:1], zeros[1:2], zeros[2:], step=step, **OPTIONS | {"lr": 1e-5, "weight_decay": 0.1})
    assert ((before.double() - p) / before).mean().item() == pytest.approx(20e-6, rel=0.005)


def test_the_cut_changes_no_bit(device):
    """Offloaded state is updated in windows."""
    arrays = [
        ranges([4096 + 64], torch.float32, device, values)[0] for values in (torch.randn, torch.randn, torch.rand)
    ]
    gradient = torch.randn(4096 + 64, device=device)
    pieces = [list(array[0].clone().split(192)) for array in arrays]
    steps(arrays, [[gradient]], None)
    steps(pieces, [list(gradient.split(192))], None)
    assert all(torch.equal(whole[0], torch.cat(cut)) for whole, cut in zip(arrays, pieces, strict=True))


def test_one_call_is_one_launch(device, monkeypatch):
    launches = []
    monkeypatch.setattr(adamw_triton.Variant, "launch", lambda variant, grid, *args: launches.append(grid))
    arrays = [ranges(WHOLE * 20, torch.float32, device, torch.zeros)[0] for _ in range(3)]
    steps(arrays, [ranges(WHOLE * 20, torch.bfloat16, device)[0]], None)
    assert launches == [(20 * (1 + 2 + 2),)]


def test_a_backward_over_weights_that_a_step_changed_raises(device):
    weight = torch.randn(64, device=device, requires_grad=True)
    loss = weight.square().sum()
    zeros = [torch.zeros(64, device=device) for _ in range(3)]
    adamw_([weight.detach()], [zeros[0]], [zeros[1]], [zeros[2]], step=1, **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: torch.randn(128).to(x.device)[::2], lambda x: x.half()])
def test_ranges_that_do_not_fit_together_are_refused(change, device):
    arrays = [[torch.ones(64, device=device), torch.ones(64, device=device)] for _ in range(4)]
    arrays[1][1] = change(arrays[1][1])
    with pytest.raises(
        ValueError, match="ranges must be contiguous, on one device, of one length in all arrays, and of one dtype"
    ):
        adamw_(*arrays, step=1, **OPTIONS)


def test_fp64_masters_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(adamw_triton, "adamw", None)
    arrays = [[torch.ones(64, device=device, dtype=torch.float64)] for _ in range(4)]
    adamw_(*arrays, step=1, **OPTIONS)
    assert not (arrays[0][0] == 1).any()
    with pytest.raises(TypeError):  # the kernel is what would have been called
        adamw_(*[[array[0].float()] for array in arrays], step=1, **OPTIONS)


def operands(device):
    p, g, m, v, w = ([torch.rand(n, device=device) for n in (64, 32)] for _ in range(5))
    return p, g, m, v, [x.bfloat16() for x in w], torch.tensor(2.0, device=device), 0.01, 0.1, 1.0, 1e-8, 0.1, 0.05


def test_operation_is_registered_soundly(device):
    opcheck(torch.ops.megalite.adamw.default, operands(device))


def test_the_compiler_sees_one_operation(device):
    args = operands(device)
    again = [[x.clone() for x in each] if isinstance(each, list) else each for each in args]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(adamw_triton.adamw, fullgraph=True, backend=backend)(*args)
    adamw_triton.adamw(*again)
    assert all(
        torch.equal(x, y)
        for left, right in zip(args[:5], again[:5], strict=True)
        for x, y in zip(left, right, strict=True)
    )
    assert "megalite.adamw.default" in [str(node.target) for node in graphs[0].graph.nodes]


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(device, assert_same_bits_and_no_wait):
    sizes = [64 * 100_003, 64, 1 << 22]
    start = [ranges(sizes, torch.float32, device, values)[0] for values in (torch.randn, torch.zeros, torch.zeros)]
    start.append(ranges(sizes, torch.bfloat16, device)[0])
    gradients, divisor = [ranges(sizes, torch.bfloat16, device)[0] for _ in range(2)], torch.tensor(3.7, device=device)

    def run():
        arrays = [[x.clone() for x in array] for array in start]
        steps(arrays, gradients, divisor)
        return [x for array in arrays for x in array]

    assert_same_bits_and_no_wait(run)


def test_a_table_of_new_addresses_is_uploaded_without_a_wait():
    """Gradients may have others in each step."""
    with DeviceRules() as rules:
        tiles = ranges_triton.cut([[torch.zeros(40, device=DEVICE), torch.zeros(7, device=DEVICE)]], 16)
        assert {rules.kind(table) for table in tiles} == {ON_DEVICE} and not rules.faults
    assert tiles.owner.tolist() == [0, 0, 0, 1] and tiles.rows[:, :2].tolist() == [[0, 40], [3, 7]]
