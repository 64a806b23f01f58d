"""Causal attention with grouped key-value heads, sliding window, document mask, score soft-cap and dropout.

    s = cap·tanh(scale·q·kᵀ / cap)    p = softmax(s over visible keys)    out = (p ∘ keep) · v
    dv = (p ∘ keep)ᵀ·dout             dp = (dout·vᵀ) ∘ keep
    ds = p ∘ (dp − Σ_keys p∘dp) ∘ (1 − (s/cap)²)
    dq = scale·ds·k                   dk = scale·dsᵀ·q

Without a soft-cap the last factor of ds is 1; keep is 0 or 1/(1 − p_drop). Key j is visible from query i iff
j ≤ i, i − j < window and j ≥ document_start[i].

The reference below processes queries in blocks, each with only the keys that some query of the block can see:
half of the matmuls of causal attention are never computed. The g query heads that share a key-value head are
adjacent rows of one matrix, so that keys are read once per group, and matmuls sum dk and dv over it. All
arithmetic is in at least fp32.

On a GPU the first implementation that supports the call runs, or the one that was measured to be the fastest
on this device (`attention_routes`). In general plain causal attention in 16 bits uses the kernels that come
with torch (`attention_library`), all other 16-bit attention with heads of up to 256 channels flash attention
in Triton (`attention_triton`), and the rest the reference, such as fp32, whose matmuls would not use tensor
cores in Triton. With train.kernels = torch only torch's own kernels or the reference run.

Values may have another width than queries and keys, and the output then has theirs. The kernels have one
width: for them the narrower tensors are padded with zeros, which changes no result.

On a CPU plain causal attention of up to 64 positions takes the few operations of `attention_short`, and the
rest the reference. The choice depends only on length and options, which no layout changes: a choice by heads
or samples would give other bits under tp. Measured on one core with 1 to 12 samples, 4 to 16 heads of 16 to
64 channels, forward and backward together: the short form takes 0.36–0.9 times as long as blocks up to 64
positions, 0.6–1.1 at 128, 0.9–2.1 at 256. torch's fused scaled_dot_product_attention takes 0.7–1.9 times as
long as the faster of both up to 64 positions in fp32, 0.9–2.0 beyond, and 3–6 times in bf16 up to 128. With
`recompute` only the inputs are kept, and memory is linear in the sequence; otherwise the probabilities are
kept. The kernels always recompute them from the log-sum-exp of each query.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite_kernels import attention_short
from megalite_kernels.backend import takes_triton
from megalite_kernels.dropout import AttentionDropout

# queries per block: of 32, 64, 128 and 256 the fastest or nearly so at every sequence length from 64 to 2,048
BLOCK = 64
WIDEST = 256  # most channels of a head that the Triton kernels support
_LIMITS = ("window", "document_start", "softcap", "dropout", "boundaries")  # options that decide the route
OWN = ("triton", "reference", "short")  # implementations whose values may have another width than keys
Boundaries = tuple[Tensor, int]
"""Offsets of the documents in the tokens of all rows, row after row, [documents + 1] int32, and the length of
the longest document."""


class _Block(NamedTuple):
    queries: range
    keys: range  # contains every key that any of the queries sees
    # [1 or B, 1, queries, 1, masked keys]: -inf where invisible, else 0; added to the scores of the last keys
    mask: Tensor


def hidden_keys(queries: Tensor, keys: Tensor, window: int | None, starts: Tensor | None) -> Tensor:
    """Return which keys a query does not see, [1 or B, 1, queries, 1, keys].

    Args:
        queries: positions [queries, 1, 1].
        keys: positions [keys].
        starts: the first visible position of each query, [queries, B].
    """
    hidden = keys > queries  # [queries, 1, keys]
    if window:
        hidden = hidden | (keys <= queries - window)
    hidden = hidden.unsqueeze(0)
    if starts is not None:
        hidden = hidden | (keys < starts.T[:, :, None, None])
    return hidden.unsqueeze(1)


def _blocks(
    sequence: int, window: int | None, document_start: Tensor | None, like: Tensor
) -> Iterator[_Block]:
    position = torch.arange(sequence, device=like.device)
    for first in range(0, sequence, BLOCK):
        stop = min(first + BLOCK, sequence)
        start = max(first - window + 1, 0) if window else 0
        # on a GPU reading the value would synchronize
        if document_start is not None and document_start.is_cpu:
            start = max(start, int(document_start[first:stop].min()))
        # Without window and documents all keys before the block are visible to all its queries: only the
        # block's diagonal needs a mask.
        masked = start if window or document_start is not None else first
        i, j = position[first:stop, None, None], position[masked:stop]
        hidden = hidden_keys(i, j, window, None if document_start is None else document_start[first:stop])
        mask = like.new_zeros(hidden.shape, dtype=torch.promote_types(like.dtype, torch.float32))
        mask.masked_fill_(hidden, -torch.inf)
        yield _Block(range(first, stop), range(start, stop), mask)


@functools.lru_cache(maxsize=8)
def _causal_blocks(sequence: int, dtype: torch.dtype, device: torch.device) -> tuple[_Block, ...]:
    """Return the blocks of plain causal attention.

    They are the same in every layer and step, and their masks have only BLOCK numbers a query.
    """
    return tuple(_blocks(sequence, None, None, torch.empty(0, dtype=dtype, device=device)))


def _rows(x: Tensor, kv_heads: int, scale: float = 1.0) -> Tensor:
    """Return [S, B, heads, D] as [B·kv_heads, S·g, D] in at least fp32, contiguous, times scale.

    Row s·g + i is position s, head i of the group.
    """
    sequence, batch, heads, dim = x.shape
    group = heads // kv_heads
    accumulate_dtype = torch.promote_types(x.dtype, torch.float32)
    rows = torch.empty(batch, kv_heads, sequence, group, dim, dtype=accumulate_dtype, device=x.device)
    torch.mul(x.unflatten(2, (kv_heads, group)).permute(1, 2, 0, 3, 4), scale, out=rows)
    return rows.view(batch * kv_heads, sequence * group, dim)


def _heads(rows: Tensor, like: Tensor, kv_heads: int, scale: float = 1.0) -> Tensor:
    """Return the inverse of `_rows`, contiguous, in the dtype of `like`.

    [B·kv_heads, S·g, D] -> [S, B, heads, D].
    """
    sequence, batch, heads, dim = like.shape
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    source = rows.view(batch, kv_heads, sequence, heads // kv_heads, dim).permute(2, 0, 1, 3, 4)
    torch.mul(source, scale, out=out.view(sequence, batch, kv_heads, heads // kv_heads, dim))
    return out


class _Problem:
    """One attention call: its sizes and options, and the steps common to forward and backward."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        window: int | None,
        document_start: Tensor | None,
        softcap: float | None,
        dropout: AttentionDropout | None,
    ) -> None:
        self.sequence, self.batch, self.heads, self.dim = q.shape
        self.kv_heads = k.shape[2]
        self.group = self.heads // self.kv_heads
        self.softcap, self.dropout = softcap, dropout
        if window is None and document_start is None:
            self.blocks = _causal_blocks(self.sequence, torch.promote_types(q.dtype, torch.float32), q.device)
        else:
            self.blocks = tuple(_blocks(self.sequence, window, document_start, q))

    def rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return `_rows` of queries, multiplied by the scale, of keys and of values."""
        return _rows(q, self.kv_heads, scale), _rows(k, self.kv_heads), _rows(v, self.kv_heads)

    def query_rows(self, block: _Block) -> slice:
        return slice(block.queries.start * self.group, block.queries.stop * self.group)

    def by_head(self, scores: Tensor, block: _Block) -> Tensor:
        """Return [B·kv_heads, queries·g, keys] viewed as [B, kv_heads, queries, g, keys]."""
        return scores.view(self.batch, self.kv_heads, len(block.queries), self.group, scores.shape[-1])

    def scores(self, query: Tensor, key: Tensor, block: _Block) -> Tensor:
        """Return masked and capped scores of one block, [B·kv_heads, queries·g, keys].

        `query` is already multiplied by the scale.
        """
        keys = key[:, block.keys.start : block.keys.stop]
        scores = torch.bmm(query[:, self.query_rows(block)], keys.transpose(1, 2))
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        self.by_head(scores, block)[..., scores.shape[-1] - block.mask.shape[-1] :].add_(block.mask)
        return scores

    def drop(self, x: Tensor, block: _Block) -> Tensor:
        """Return x ∘ keep: with dropout a new tensor, else x itself."""
        if self.dropout is None or self.dropout.p == 0.0:
            return x
        keep = self.dropout.scale(self.heads, block.queries, block.keys, x.dtype)  # [B, heads, queries, keys]
        keep = keep.unflatten(1, (self.kv_heads, self.group)).transpose(2, 3)
        return self.by_head(x, block).mul(keep).view(x.shape)


def _route(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    document_start: Tensor | None,
    softcap: float | None,
    dropout: AttentionDropout | None,
    boundaries: Boundaries | None,
) -> str:
    """Return the name of the implementation: triton, reference, short, or one of `attention_routes`."""
    if not q.is_cuda:
        if takes_triton(q) and q.shape[-1] <= WIDEST and v.shape[-1] <= WIDEST:
            return "triton"
        plain = window is None and document_start is None and softcap is None and dropout is None
        return "short" if plain and 0 < q.shape[0] <= attention_short.LONGEST else "reference"
    width = max(q.shape[-1], v.shape[-1])
    from megalite_kernels.attention_routes import AttentionCall, choose

    if q.shape[-1] != v.shape[-1]:  # a library gets them padded
        q, k, v = (x.new_empty(*x.shape[:-1], width) for x in (q, k, v))
    call = AttentionCall(
        q,
        k,
        v,
        window=window is not None,
        documents=document_start is not None,
        boundaries=boundaries is not None,
        softcap=softcap is not None,
        dropout=dropout is not None,
    )
    return choose(call).name


def _library(route: str, *options: Any) -> tuple[Any, Any]:
    """Return the passes of a kernel that is not of this package, and the options of a call to it."""
    from megalite_kernels.attention_library import Options
    from megalite_kernels.attention_routes import BY_NAME

    calls = BY_NAME[route].calls
    assert calls is not None
    calls.prepare()
    return calls, Options(*options)


def padded(width: int, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with zeros appended to their last dimension up to a width."""
    missing = [width - x.shape[-1] for x in tensors]
    pad = torch.nn.functional.pad
    return [pad(x, (0, count)) if count else x for x, count in zip(tensors, missing, strict=True)]


def _fields(dropout: AttentionDropout | None) -> tuple[Tensor | None, int, float, int, int]:
    """Return the fields of dropout as arguments of the registered operations; p = 0: no dropout."""
    if dropout is None or dropout.p == 0.0:
        return None, 0, 0.0, 0, 0
    return dropout.samples, dropout.key, dropout.p, dropout.head_offset, dropout.position_offset


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    document_start: Tensor | None = None,
    softcap: float | None = None,
    dropout: AttentionDropout | None = None,
    recompute: bool = False,
    boundaries: Boundaries | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return out [S, B, hq, Dv], contiguous, and the tensors to save for `attention_backward`.

    The reference saves its probabilities block by block (none with `recompute` or a soft-cap), a kernel the
    log-sum-exp of each query's scores.

    Args:
        q, k, v: [S, B, hq, D], [S, B, hk, D], [S, B, hk, Dv] of any strides; hq is a multiple of hk.
        document_start: [S, B], the index in the row of the first token of each token's document.
        boundaries: the same documents; some implementations cannot run without it.
    """
    width, value_width = q.shape[-1], v.shape[-1]
    route = _route(q, k, v, window, document_start, softcap, dropout, boundaries)
    if width != value_width and route not in OWN:
        out, saved = attention(
            *padded(max(width, value_width), q, k, v),
            scale=scale,
            window=window,
            document_start=document_start,
            softcap=softcap,
            dropout=dropout,
            recompute=recompute,
            boundaries=boundaries,
        )
        return out[..., :value_width].contiguous(), saved
    if route == "triton":
        from megalite_kernels import attention_triton

        flash_out, lse = attention_triton.flash_attention(
            q, k, v, scale, window, document_start, softcap, *_fields(dropout)
        )
        return flash_out, (lse,)
    if route == "short":
        out, (*_, probabilities) = attention_short.forward(q, k, v, scale)
        return out, () if recompute else (probabilities,)
    if route != "reference":
        calls, options = _library(route, scale, window, boundaries)
        return calls.forward(q, k, v, options)
    problem = _Problem(q, k, window, document_start, softcap, dropout)
    query, key, value = problem.rows(q, k, v, scale)
    out = torch.empty(*query.shape[:2], value.shape[-1], dtype=query.dtype, device=query.device)
    kept = []
    for block in problem.blocks:
        scores = problem.scores(query, key, block)
        probabilities = torch.softmax(scores, -1, out=scores)
        if not recompute and softcap is None:
            kept.append(probabilities)
        values = value[:, block.keys.start : block.keys.stop]
        torch.bmm(problem.drop(probabilities, block), values, out=out[:, problem.query_rows(block)])
    return _heads(out, q.new_empty(*q.shape[:3], v.shape[-1]), problem.kv_heads), tuple(kept)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: tuple[Tensor, ...],
    *,
    scale: float,
    window: int | None = None,
    document_start: Tensor | None = None,
    softcap: float | None = None,
    dropout: AttentionDropout | None = None,
    recompute: bool = False,
    boundaries: Boundaries | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [S, B, hq, D], dk [S, B, hk, D] and dv [S, B, hk, Dv], of any strides.

    The options are the forward's, and `saved` is as it returned it.

    The reference does not read `out`; a kernel, which never holds a whole row of probabilities, computes
    Σ_keys p∘dp = Σ_dim dout∘out from it.
    """
    width, value_width = q.shape[-1], v.shape[-1]
    route = _route(q, k, v, window, document_start, softcap, dropout, boundaries)
    if width != value_width and route not in OWN:
        dout, q, k, v, out = padded(max(width, value_width), dout, q, k, v, out)
        dq, dk, dv = attention_backward(
            dout,
            q,
            k,
            v,
            out,
            saved,
            scale=scale,
            window=window,
            document_start=document_start,
            softcap=softcap,
            dropout=dropout,
            recompute=recompute,
            boundaries=boundaries,
        )
        return dq[..., :width], dk[..., :width], dv[..., :value_width]
    if route == "triton":
        from megalite_kernels import attention_triton

        arguments = scale, window, document_start, softcap, *_fields(dropout)
        return attention_triton.flash_attention_backward(dout, q, k, v, out, saved[0], *arguments)
    if route == "short":
        query, key, value = (attention_short.rows_of(x, k.shape[2]) for x in (q, k, v))
        return attention_short.backward(dout, query, key, value, saved[0] if saved else None, scale)
    if route != "reference":
        calls, options = _library(route, scale, window, boundaries)
        return calls.backward(dout, q, k, v, out, saved, options)
    problem = _Problem(q, k, window, document_start, softcap, dropout)
    query, key, value = problem.rows(q, k, v, scale)
    grad = _rows(dout, problem.kv_heads)
    dquery, dkey, dvalue = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for index, block in enumerate(problem.blocks):
        rows, keys = problem.query_rows(block), slice(block.keys.start, block.keys.stop)
        if saved:
            probabilities = saved[index]
        else:
            scores = problem.scores(query, key, block)
            probabilities = torch.softmax(scores, -1, out=None if softcap else scores)
        dvalue[:, keys].baddbmm_(problem.drop(probabilities, block).transpose(1, 2), grad[:, rows])
        dprobabilities = problem.drop(torch.bmm(grad[:, rows], value[:, keys].transpose(1, 2)), block)
        dscores = torch.ops.aten._softmax_backward_data.out(
            dprobabilities, probabilities, -1, probabilities.dtype, grad_input=dprobabilities
        )
        if softcap:
            scores.masked_fill_(probabilities == 0, 0)
            dscores.mul_(scores.div_(softcap).square_().neg_().add_(1))
        torch.bmm(dscores, key[:, keys], out=dquery[:, rows])
        dkey[:, keys].baddbmm_(dscores.transpose(1, 2), query[:, rows])
    return (
        _heads(dquery, q, problem.kv_heads, scale),
        _heads(dkey, k, problem.kv_heads),
        _heads(dvalue, v, problem.kv_heads),
    )


def forward_keeping(
    q: Tensor, k: Tensor, v: Tensor, *, recompute: bool = False, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return `attention`, and all that `backward_of_kept` needs, inputs included.

    Of short sequences in at least fp32 the inputs are kept as the matmuls of both passes read them, in the
    same bytes.
    """
    limits = {name: options.get(name) for name in _LIMITS}
    if q.dtype in (torch.float32, torch.float64) and _route(q, k, v, **limits) == "short":
        out, kept = attention_short.forward(q, k, v, options["scale"])
        return out, kept[:3] if recompute else kept
    out, saved = attention(q, k, v, recompute=recompute, **options)
    return out, (q, k, v, out, *saved)


def backward_of_kept(
    dout: Tensor, kept: tuple[Tensor, ...], *, recompute: bool = False, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `forward_keeping`, as `attention_backward`; dout is [S, B, hq, Dv]."""
    if kept[0].dim() == 3:  # rows
        query, key, value, *probabilities = kept
        scores = probabilities[0] if probabilities else None
        return attention_short.backward(dout, query, key, value, scores, options["scale"])
    q, k, v, out, *saved = kept
    return attention_backward(dout, q, k, v, out, tuple(saved), recompute=recompute, **options)
