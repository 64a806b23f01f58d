import pytest
import torch
import torch.nn.functional as F
from megalite_kernels import cross_entropy
from megalite_kernels.cross_entropy import combine, gradient_, statistics

IGNORE = -100


def split_loss(logits, targets, ranks, padded, smoothing, z, grad_scale):
    """Loss and gradient of logits [T, V] computed as `ranks` ranks of `padded` columns each would."""
    vocab = logits.shape[1]
    shards, stats = [], []
    for rank in range(ranks):
        start = min(rank * padded, vocab)
        valid = min(vocab - start, padded)
        # padding that would win if it counted
        shard = torch.full((logits.shape[0], padded), 1e4, dtype=logits.dtype, device=logits.device)
        shard[:, :valid] = logits[:, start : start + valid]
        kept = shard.clone()
        stats.append(statistics(shard, targets, start, valid, IGNORE, smoothing > 0))
        torch.testing.assert_close(shard, kept, rtol=0, atol=0, equal_nan=True)
        shards.append((shard, start, valid))
    loss, lse = combine(torch.stack(stats), targets, IGNORE, smoothing, z, vocab)
    gradients = []
    for shard, start, valid in shards:
        result = gradient_(shard, targets, lse, grad_scale, start, valid, IGNORE, smoothing, z, vocab)
        assert result.data_ptr() == shard.data_ptr()
        assert not shard[:, valid:].any()
        gradients.append(shard[:, :valid])
    return loss, torch.cat(gradients, 1)


def torch_loss(logits, targets, smoothing, z, grad_scale):
    logits = logits.detach().clone().requires_grad_()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, label_smoothing=smoothing, reduction="none")
    loss = loss + z * logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(1).square() * (
        targets != IGNORE
    )
    return loss.detach(), torch.autograd.grad((loss * grad_scale).sum(), logits)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("smoothing, z", [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize(
    "tokens, vocab, ranks, padded", [(37, 65, 1, 65), (37, 65, 2, 40), (64, 65, 4, 32), (50, 301, 3, 128)]
)
def test_as_torch_on_any_number_of_ranks(tokens, vocab, ranks, padded, smoothing, z, dtype, as_exact_as, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, "cpu", 700)  # several chunks, the last one short
    logits = (4 * torch.randn(tokens, vocab)).to(dtype)
    targets = torch.randint(0, vocab, (tokens,))
    targets[3::5] = IGNORE
    loss, gradient = split_loss(logits, targets, ranks, padded, smoothing, z, torch.tensor(0.37, dtype=torch.float64))
    torchs = torch_loss(logits, targets, smoothing, z, 0.37)
    exact = torch_loss(logits.double(), targets, smoothing, z, 0.37)
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and gradient.dtype == dtype
    factor = 1.5 if ranks == 1 else 2.0  # each rank's log-sum-exp is rounded once more
    as_exact_as(loss, torchs[0], exact[0], factor)
    as_exact_as(gradient, torchs[1], exact[1], factor)
    assert not loss[3::5].any() and not gradient[3::5].any()
    if dtype == torch.float64:
        torch.testing.assert_close(loss, exact[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, exact[1], rtol=1e-12, atol=1e-12)


def test_a_factor_for_each_token():
    logits, factors = torch.randn(37, 65, dtype=torch.float64), torch.randn(37, dtype=torch.float64)
    targets = torch.randint(0, 65, (37,)).masked_fill(torch.arange(37) % 5 == 3, IGNORE)
    torch.testing.assert_close(
        split_loss(logits, targets, 2, 40, 0.1, 0.1, factors), torch_loss(logits, targets, 0.1, 0.1, factors)
    )


def test_one_token():
    logits, target = torch.randn(1, 11, dtype=torch.float64), torch.tensor([7])
    torch.testing.assert_close(
        split_loss(logits, target, 3, 4, 0.1, 0.1, 2.0), torch_loss(logits, target, 0.1, 0.1, 2.0)
    )


def test_no_tokens_and_only_ignored_tokens():
    empty = split_loss(torch.randn(0, 9), torch.empty(0, dtype=torch.long), 2, 5, 0.1, 0.1, 1.0)
    assert empty[0].shape == (0,) and empty[1].shape == (0, 9)
    loss, gradient = split_loss(torch.randn(4, 9), torch.full((4,), IGNORE), 2, 5, 0.1, 0.1, 1.0)
    assert not loss.any() and not gradient.any()


def test_large_logits_do_not_overflow_and_unlikely_shards_do_not_vanish():
    logits = torch.randn(6, 12, dtype=torch.float64)
    logits[:, 6:] += 1e4  # the first rank's probabilities underflow
    targets = torch.tensor([0, 11, 3, 7, 5, 6])
    loss, gradient = split_loss(logits.float(), targets, 2, 6, 0.0, 0.0, 1.0)
    exact = torch_loss(logits.float().double(), targets, 0.0, 0.0, 1.0)
    torch.testing.assert_close(loss.double(), exact[0], rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-3, atol=1e-3)
