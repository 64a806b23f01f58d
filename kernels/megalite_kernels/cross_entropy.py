"""Cross-entropy over a vocabulary that is split over ranks.

This is the arithmetic of one rank, without communication.

Each rank holds the logits of columns [vocab_start, vocab_start + valid) of the global vocabulary, followed by
padding if any. With x the logits of a token, y its target, V the global vocabulary size, lse = log Σ exp(x),
ε the label smoothing and z the z-loss coefficient:

    loss = (1 − ε)·(lse − x_y) + ε·(lse − mean(x)) + z·lse²
    dx_j = g·((1 + 2·z·lse)·exp(x_j − lse) − (1 − ε)·[j = y] − ε/V)

As in torch's F.cross_entropy, ε is spread over all V classes, the target included. Each rank computes
`statistics` ([k, T]), the caller all-gathers them, `combine` gives the same result on all ranks, and
`gradient_` overwrites the logits without communication. Tokens whose target is `ignore_index` have loss 0 and
gradient 0. Rows are processed in chunks that stay in cache, so that several elementwise passes cost one pass
over memory.
"""

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton

# per chunk of rows: 1 MB of fp32 stays in cache; 128 MB limit a GPU's temporaries
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}


def _chunk_rows(logits: Tensor) -> int:
    return max(CHUNK_ELEMENTS["cuda" if logits.is_cuda else "cpu"] // max(logits.shape[1], 1), 1)


def _local_targets(targets: Tensor, vocab_start: int, valid: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target and whether this rank has it, [T, 1] each.

    Columns are clamped to this rank's columns.
    """
    column = (targets - vocab_start).unsqueeze(1)
    inside = (column >= 0) & (column < valid) & (targets != ignore_index).unsqueeze(1)
    return column.clamp(0, max(valid - 1, 0)), inside


def statistics(
    logits: Tensor, targets: Tensor, vocab_start: int, valid: int, ignore_index: int, with_sum: bool
) -> Tensor:
    """Return the statistics of this rank's columns, [3 or 4, T] in at least fp32.

    Over the first `valid` columns these are the largest logit m and Σ exp(x − m) (without columns the lowest
    number or -inf, and 0), the target's logit (0 if it is on another rank), and, with `with_sum` for label
    smoothing, the sum of the logits.

    Args:
        logits: [T, V_local]; they are not modified.
        targets: [T], global token ids.
    """
    if takes_triton(logits):
        from megalite_kernels import cross_entropy_triton

        return cross_entropy_triton.cross_entropy_statistics(
            logits, targets, vocab_start, valid, ignore_index, with_sum
        )
    accumulate_dtype = torch.promote_types(logits.dtype, torch.float32)
    stats = torch.zeros(4 if with_sum else 3, logits.shape[0], dtype=accumulate_dtype, device=logits.device)
    if not valid:
        stats[0] = -torch.inf
        return stats
    columns, inside = _local_targets(targets, vocab_start, valid, ignore_index)
    rows = _chunk_rows(logits)
    for first in range(0, logits.shape[0], rows):
        chunk = logits[first : first + rows, :valid]
        # The largest probability is 1 / Σ exp(x − max): torch's fused softmax and two maxima are faster than
        # a separate exp and sum.
        stats[0, first : first + rows] = chunk.amax(1)
        stats[1, first : first + rows] = torch.softmax(chunk, 1, dtype=accumulate_dtype).amax(1).reciprocal_()
        if with_sum:
            stats[3, first : first + rows] = chunk.sum(1, dtype=accumulate_dtype)
    stats[2] = logits.gather(1, columns).to(accumulate_dtype).masked_fill_(~inside, 0).squeeze(1)
    return stats


def combine(
    stats: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token [T] and the global log-sum-exp [2, T] from the statistics of all ranks.

    The loss is 0 where ignored. The log-sum-exp is a rounded value and its rounding error. The statistics are
    [ranks, k, T].

    Computed in fp64 and rounded once, so that splitting the vocabulary costs no accuracy; the tensors are
    small.
    """
    exact = stats.double()
    lse = (exact[:, 0] + exact[:, 1].log()).logsumexp(0)
    loss = lse - (1 - label_smoothing) * exact[:, 2].sum(0)
    if label_smoothing:
        loss -= (label_smoothing / vocab_size) * exact[:, 3].sum(0)
    if z_loss:
        loss += z_loss * lse.square()
    rounded = lse.to(stats.dtype)
    error = (lse - rounded).to(stats.dtype)
    return loss.masked_fill_(targets == ignore_index, 0).to(stats.dtype), torch.stack([rounded, error])


def gradient_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_scale: float | Tensor,
    vocab_start: int,
    valid: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
) -> Tensor:
    """Overwrite logits [T, V_local] with d(Σ grad_scale · loss)/d(logits), and return them.

    Padded columns and ignored rows become 0.

    Args:
        lse: from `combine`, [2, T].
        grad_scale: a number, or a tensor [] or [T] (a factor for each token) on the logits' device, which is
            read without synchronization.
    """
    if takes_triton(logits):
        from megalite_kernels import cross_entropy_triton

        if not isinstance(grad_scale, Tensor):
            grad_scale = torch.full((), grad_scale, device=logits.device)
        scale = grad_scale.to(torch.float32)
        terms = (vocab_start, valid, ignore_index, label_smoothing, z_loss, vocab_size)
        cross_entropy_triton.cross_entropy_gradient_(logits, targets, lse, scale, *terms)
        return logits
    if not valid or not logits.shape[0]:
        return logits.zero_()
    lse, rest = lse
    accumulate_dtype = lse.dtype
    counted = ((targets != ignore_index).to(accumulate_dtype) * grad_scale).unsqueeze(1)  # [T, 1]
    factor = counted * (1 + 2 * z_loss * lse.unsqueeze(1)) if z_loss else counted
    columns, inside = _local_targets(targets, vocab_start, valid, ignore_index)
    own = logits.gather(1, columns).to(accumulate_dtype)  # [T, 1], of the targets
    own = (own - lse.unsqueeze(1)).sub_(rest.unsqueeze(1)).exp_().mul_(factor)
    at_target = own - (1 - label_smoothing) * counted * inside
    rows = _chunk_rows(logits)
    shape = min(rows, logits.shape[0]), logits.shape[1]
    seed = torch.zeros(shape, dtype=accumulate_dtype, device=logits.device)
    for first in range(0, logits.shape[0], rows):
        part = slice(first, first + rows)
        # padding included: the fused pass needs dense rows, and gives wrong results for others without an
        # error
        chunk = logits[part]
        gradient = chunk.to(accumulate_dtype).contiguous().sub_(lse[part].unsqueeze(1))
        # log-softmax's backward is seed − exp(output)·Σ seed: a seed of −factor in the target's column gives
        # factor · exp in all other columns in one fused pass; the target's column is written afterwards.
        grad = seed[: chunk.shape[0]].scatter_(1, columns[part], -factor[part])
        torch.ops.aten._log_softmax_backward_data.out(grad, gradient, 1, accumulate_dtype, out=gradient)
        gradient.scatter_(1, columns[part], at_target[part])
        grad.scatter_(1, columns[part], 0)
        if label_smoothing:
            gradient.sub_(counted[part] * (label_smoothing / vocab_size))
        if gradient.data_ptr() != chunk.data_ptr():
            chunk.copy_(gradient)
    logits[:, valid:] = 0
    return logits
