"""The cross-entropy kernels against torch and float64, one rank's columns at a time."""

import pytest
import torch
from megalite_kernels import cross_entropy, cross_entropy_triton
from megalite_kernels.cross_entropy import combine, gradient_, statistics
from torch.library import opcheck

from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_cross_entropy import IGNORE, split_loss, torch_loss

# of padding, which is masked afterwards
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = {  # tokens, vocabulary, ranks, padded columns of each
    "less than a tile": (7, 65, 1, 72),
    "no multiple of anything": (5, 6101, 1, 6101),
    "whole tiles": (2, 8192, 1, 8192),
    "split, the last rank short": (5, 9001, 2, 4608),
    "split, the last rank bare": (3, 13, 3, 8),
}


def inputs(tokens, vocab, dtype, device):
    logits = (4 * torch.randn(tokens, vocab)).to(device, dtype)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    targets[1::3] = IGNORE
    return logits, targets


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.1, 1e-2)])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_as_accurate_as_torch(size, smoothing, z, dtype, device):
    tokens, vocab, ranks, padded = size
    logits, targets = inputs(tokens, vocab, dtype, device)
    # a factor for each token, or one for all
    scale = torch.tensor(0.37, device=device) if smoothing else torch.randn(tokens, device=device)
    loss, gradient = split_loss(logits, targets, ranks, padded, smoothing, z, scale)
    exact = torch_loss(logits.double(), targets, smoothing, z, scale)
    torchs = (
        torch_loss(logits.float(), targets, smoothing, z, scale)[0],
        torch_loss(logits, targets, smoothing, z, scale)[1],
    )
    assert_as_accurate(loss, exact[0], torchs[0])
    assert_as_accurate(gradient, exact[1], torchs[1])
    assert not loss[1::3].any() and not gradient[1::3].any()


def test_no_token_and_only_ignored_ones(device):
    empty = split_loss(
        torch.randn(0, 9, device=device), torch.empty(0, dtype=torch.long, device=device), 2, 5, 0.1, 0.1, 1.0
    )
    assert empty[0].shape == (0,) and empty[1].shape == (0, 9)
    loss, gradient = split_loss(
        torch.full((2, 9), torch.nan, device=device), torch.full((2,), IGNORE, device=device), 2, 5, 0.1, 0.1, 1.0
    )
    assert not loss.any() and not gradient.any()


def test_large_logits_and_minus_infinity(device):
    logits = torch.randn(4, 12, device=device)
    logits[:, 6:] += 1e4  # the first rank's probabilities underflow
    logits[0, 3] = -torch.inf
    targets = torch.tensor([0, 11, 3, 7], device=device)
    loss, gradient = split_loss(logits, targets, 2, 6, 0.0, 0.0, 1.0)
    exact = torch_loss(logits.double(), targets, 0.0, 0.0, 1.0)
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-3, atol=1e-3)
    logits[1, 2] = torch.nan
    assert split_loss(logits, targets, 2, 6, 0.0, 0.0, 1.0)[0].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0, dtype=torch.float64)], ids=["number", "tensor"])
@pytest.mark.parametrize("layout", ["columns first", "every other row", "every other column", "unaligned"])
def test_logits_may_have_any_strides(layout, scale, device):
    plain, targets = inputs(5, 48, torch.float32, device)
    strided = {
        "columns first": plain.t().contiguous().t(),
        "every other row": torch.empty(10, 48, device=device)[::2],
        "every other column": torch.empty(5, 96, device=device)[:, ::2],
        "unaligned": torch.empty(5 * 51 + 1, device=device)[1:].view(5, 51)[:, 3:],
    }[layout].copy_(plain)
    args = (targets, 0, 45, IGNORE, True)
    stats = statistics(strided, *args)
    torch.testing.assert_close(stats, statistics(plain, *args), rtol=1e-6, atol=1e-6)
    lse = combine(stats[None], targets, IGNORE, 0.1, 0.1, 45)[1]
    for logits in (strided, plain):
        scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
        assert gradient_(logits, targets, lse, scale, 0, 45, IGNORE, 0.1, 0.1, 45) is logits
    torch.testing.assert_close(strided, plain, rtol=1e-6, atol=1e-6)


def test_fp64_takes_the_reference(device, monkeypatch):
    monkeypatch.setattr(cross_entropy_triton, "cross_entropy_statistics", None)
    logits, targets = inputs(3, 9, torch.float64, device)
    torch.testing.assert_close(
        split_loss(logits, targets, 1, 9, 0.0, 0.0, 1.0), torch_loss(logits, targets, 0.0, 0.0, 1.0)
    )
    with pytest.raises(TypeError):  # the kernel is what would have been called
        statistics(logits.float(), targets, 0, 9, IGNORE, False)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_second_backward_and_a_gradient_of_the_gradient_raise(kernels, device):
    """Through the loss as the model calls it: the logits are gone after the first backward."""
    from megalite_kernels import backend

    from megalite.mesh.mesh import Layout, Mesh
    from megalite.parallel.tensor.cross_entropy import CrossEntropy

    backend.select(kernels)
    x, targets = (tensor[:3] for tensor in inputs(4, 40, torch.float32, device))
    x.requires_grad_()
    loss = CrossEntropy(Mesh(Layout()).tp, 40)(2 * x, targets, 0.5)
    loss.backward(retain_graph=True)
    expected = torch_loss(2 * x, targets, 0.0, 0.0, 1.0)[1]
    torch.testing.assert_close(x.grad, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = CrossEntropy(Mesh(Layout()).tp, 40)(2 * x, targets, 0.5)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_operations_are_registered_soundly(device):
    logits, targets = inputs(3, 40, torch.float32, device)
    opcheck(torch.ops.megalite.cross_entropy_statistics.default, (logits, targets, 0, 40, IGNORE, True))
    scalars = (torch.ones((), device=device), 0, 40, IGNORE, 0.1, 0.1, 40)
    lse = torch.stack([logits.logsumexp(1), torch.zeros(3, device=device)])
    opcheck(torch.ops.megalite.cross_entropy_gradient_.default, (logits, targets, lse, *scalars))


def test_the_compiler_sees_two_operations(device):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def step(logits, targets):
        stats = statistics(logits, targets, 0, 40, IGNORE, False)
        loss, lse = combine(stats[None], targets, IGNORE, 0.0, 0.0, 40)
        return loss, gradient_(logits, targets, lse, 1.0, 0, 40, IGNORE, 0.0, 0.0, 40)

    logits, targets = inputs(3, 40, torch.float32, device)
    compiled = torch.compile(step, fullgraph=True, backend=backend)(logits.clone(), targets)
    for got, expected in zip(compiled, step(logits, targets), strict=True):
        torch.testing.assert_close(got, expected)
    called = [str(node.target) for node in graphs[0].graph.nodes if "megalite" in str(node.target)]
    assert called == ["megalite.cross_entropy_statistics.default", "megalite.cross_entropy_gradient_.default"]


@pytest.mark.gpu
def test_results_are_the_same_bits_each_time_and_nothing_waits_for_the_host(device, assert_same_bits_and_no_wait):
    logits, targets = inputs(256, 128256, torch.bfloat16, device)
    scale = torch.tensor(0.5, device=device)

    def run():
        stats = statistics(logits, targets, 0, 128200, IGNORE, True)
        loss, lse = combine(stats[None], targets, IGNORE, 0.1, 1e-3, 128200)
        return loss, *(
            gradient_(logits.clone(), targets, lse, by, 0, 128200, IGNORE, 0.1, 1e-3, 128200) for by in (scale, 0.5)
        )

    assert_same_bits_and_no_wait(run)


@pytest.mark.gpu
def test_nothing_of_the_logits_size_is_allocated(device):
    logits, targets = inputs(1024, 32768, torch.bfloat16, device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stats = statistics(logits, targets, 0, 32768, IGNORE, False)
    _, lse = combine(stats[None], targets, IGNORE, 0.0, 0.0, 32768)
    cross_entropy.gradient_(logits, targets, lse, 1.0, 0, 32768, IGNORE, 0.0, 0.0, 32768)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 100
