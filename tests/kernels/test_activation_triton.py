"""The gated activations' kernels against torch and float64."""

import pytest
import torch
from megalite_kernels import activation, activation_triton
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_activation import autograd, gated

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(shape, dtype, device):
    gate_up = (3 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype)
    return torch.randn(shape).to(device, dtype), gate_up.to(device)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 3, 300), (33, 16), (1, 1), (0, 8), (3, 0)], ids=str)
def test_as_accurate_as_torch(act, dtype, shape, device):
    dh, gate_up = inputs(shape, dtype, device)
    kept = dh.clone(), gate_up.clone()
    h, (dgate_up, again) = activation.gated_forward(gate_up, act), activation.gated_backward(dh, gate_up, act)
    torchs = autograd(lambda x: gated(x, act), gate_up, dh)
    exact = autograd(lambda x: gated(x, act), gate_up.double(), dh)
    for got in (h, again):
        assert_as_accurate(got, exact[0], torchs[0])
    assert_as_accurate(dgate_up, exact[1], torchs[1])
    assert torch.equal(dh, kept[0]) and torch.equal(gate_up, kept[1])


def test_large_values_saturate(device):
    gate_up = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0, 2.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    dh = torch.ones(1, 5, device=device)
    for act in ("silu", "gelu_new"):
        exact = autograd(lambda x, act=act: gated(x, act), gate_up.double(), dh)
        torch.testing.assert_close(activation.gated_forward(gate_up, act), exact[0].float())
        torch.testing.assert_close(activation.gated_backward(dh, gate_up, act)[0], exact[1].float())


def test_inputs_may_have_any_strides(device):
    gate_up, dh = (
        torch.randn(5, 12, 7, device=device).transpose(1, 2),
        torch.randn(7, 5, 13, device=device).transpose(0, 1)[..., 2:8],
    )
    assert torch.equal(
        activation.gated_forward(gate_up, "silu"), activation.gated_forward(gate_up.contiguous(), "silu")
    )
    got, expected = (
        activation.gated_backward(*pair, "silu") for pair in ((dh, gate_up), (dh.contiguous(), gate_up.contiguous()))
    )
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_activations_without_a_kernel_and_fp64_take_the_reference(device, monkeypatch):
    monkeypatch.setattr(activation_triton, "gated_forward", None)
    gate_up = torch.randn(2, 8, device=device)
    torch.testing.assert_close(activation.gated_forward(gate_up, "relu"), gated(gate_up, "relu"))
    torch.testing.assert_close(activation.gated_forward(gate_up.double(), "silu"), gated(gate_up.double(), "silu"))
    with pytest.raises(TypeError):  # the kernel is what would have been called
        activation.gated_forward(gate_up, "silu")


def test_operations_are_registered_soundly(device):
    dh, gate_up = inputs((3, 8), torch.float32, device)
    opcheck(torch.ops.megalite.gated_forward.default, (gate_up, "silu"))
    opcheck(torch.ops.megalite.gated_backward.default, (dh, gate_up, "silu"))


def test_the_compiler_sees_one_operation(device):
    dh, gate_up = inputs((3, 8), torch.float32, device)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(dh, gate_up):
        return activation.gated_forward(2 * gate_up, "silu"), *activation.gated_backward(dh, 2 * gate_up, "silu")

    compiled = torch.compile(step, fullgraph=True, backend=backend)(dh, gate_up)
    for got, expected in zip(compiled, step(dh, gate_up), strict=True):
        assert torch.equal(got, expected)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert "megalite.gated_forward.default" in targets and "megalite.gated_backward.default" in targets


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(device, assert_same_bits_and_no_wait):
    dh, gate_up = inputs((1024, 14336), torch.bfloat16, device)

    def run():
        return activation.gated_forward(gate_up, "silu"), *activation.gated_backward(dh, gate_up, "silu")

    assert_same_bits_and_no_wait(run)
