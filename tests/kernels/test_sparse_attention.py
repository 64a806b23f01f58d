"""Attention to selected rows against its definition in float64."""

import pytest
import torch
from megalite_kernels import attention, index_scores, selected_rows, sparse_attention

SCALE = 0.3


def selection_of(queries, batch, rows, top):
    """Rows up to the query's own position, fewer than `top` at the begin; the last query selects none."""
    selection = torch.full((queries, batch, top), -1, dtype=torch.int32)
    for query in range(queries - 1):
        for row in range(batch):
            chosen = torch.randperm(min(query + 1, rows))[:top].sort().values
            selection[query, row, : len(chosen)] = chosen
    return selection


def by_definition(q, keys, values, selection, scale=SCALE):
    """Outputs, log-sum-exps and probabilities summed over heads, with all scores and a mask."""
    group = q.shape[2] // keys.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
    chosen = torch.zeros(*selection.shape[:2], len(keys) + 1, dtype=torch.bool)
    chosen.scatter_(2, selection.long().masked_fill(selection < 0, len(keys)), True)
    scores = torch.einsum("sbhd,tbhd->sbht", q, keys) * scale
    scores = scores.masked_fill(~chosen[:, :, None, :-1], -torch.inf)
    p = scores.softmax(-1).masked_fill(~chosen[:, :, None, :-1], 0)
    summed = p.sum(2).gather(2, selection.clamp_min(0).long()).masked_fill(selection < 0, 0)
    return torch.einsum("sbht,tbhd->sbhd", p, values), scores.logsumexp(-1), summed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 1, 0), (4, 1, 5), (4, 4, 6), (6, 2, 6)])
def test_attention_and_its_gradients(heads, groups, width, dtype, as_exact_as, monkeypatch):
    """Latents whose first channels are the values (0: their number is given), and keys with values of their own."""
    monkeypatch.setattr(selected_rows, "_ELEMENTS", 3000)
    q, keys, dout = torch.randn(17, 2, heads, 8), torch.randn(20, 2, groups, 8), torch.randn(17, 2, heads, width or 5)
    own = torch.randn(20, 2, groups, width)
    q, keys, dout, own = (x.to(dtype) for x in (q, keys, dout, own))
    selection = selection_of(17, 2, 20, 6)

    def defined(wide):
        """Outputs, log-sum-exps, probabilities and gradients, all in one precision."""
        leaves = [x.to(wide).detach().clone().requires_grad_() for x in ((q, keys, own) if width else (q, keys))]
        results = by_definition(*leaves[:2], leaves[2] if width else leaves[1][..., :5], selection)
        return *(x.detach() for x in results), *torch.autograd.grad(results[0], leaves, dout.to(wide))

    exact, torchs = defined(torch.float64), defined(dtype)
    values = own if width else 5
    out, log_sums = sparse_attention.forward(q, keys, values, selection, SCALE)
    assert (log_sums[-1] == -torch.inf).all()
    assert (out[-1] == 0).all()
    gradients = sparse_attention.backward(dout, q, keys, values, out, log_sums, selection, SCALE)
    assert (gradients.values is None) == (width == 0)
    p = sparse_attention.probabilities(q, keys, selection, log_sums, SCALE)
    ours = out, log_sums[:-1], p, *(x for x in gradients if x is not None)
    assert [x.dtype == dtype for x in ours][:4] == [True, dtype.itemsize > 2, dtype.itemsize > 2, True]
    for got, torchs_own, true in zip(ours, torchs, exact, strict=True):
        end = len(got)  # of the log-sum-exps, the last of which is infinite
        as_exact_as(got, torchs_own[:end].to(got.dtype), true[:end], factor=2)


def test_values_in_the_keys_are_those_of_a_view():
    q, keys = torch.randn(5, 1, 3, 8), torch.randn(5, 1, 1, 8)
    selection, dout = selection_of(5, 1, 5, 3), torch.randn(5, 1, 3, 6)
    view = keys[..., :6]
    out, lse = sparse_attention.forward(q, keys, 6, selection, SCALE)
    assert torch.equal(out, sparse_attention.forward(q, keys, view, selection, SCALE)[0])
    joint = sparse_attention.backward(dout, q, keys, 6, out, lse, selection, SCALE)
    apart = sparse_attention.backward(dout, q, keys, view, out, lse, selection, SCALE)
    assert apart.values is not None
    apart.keys[..., :6] += apart.values
    torch.testing.assert_close(joint.keys, apart.keys)


def test_all_visible_rows_are_ordinary_attention(as_exact_as):
    q, k, v, dout = (torch.randn(40, 2, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    starts = torch.arange(40)[:, None].expand(-1, 2) // 16 * 16
    selection = index_scores.visible_rows(torch.arange(40)[:, None], 40, document_start=starts)
    exact, saved = attention.attention(q, k, v, scale=SCALE, document_start=starts)
    out, lse = sparse_attention.forward(q, k, v, selection, SCALE)
    as_exact_as(out, exact, exact)
    expected = attention.attention_backward(dout, q, k, v, exact, saved, scale=SCALE, document_start=starts)
    gradients = sparse_attention.backward(dout, q, k, v, out, lse, selection, SCALE)
    for ours, true in zip(gradients, expected, strict=True):
        as_exact_as(ours, true, true)


def test_rows_that_are_not_selected_may_be_anything():
    q, keys, selection = torch.randn(6, 1, 2, 8), torch.randn(9, 1, 1, 8), selection_of(6, 1, 6, 3)
    dout = torch.randn(6, 1, 2, 4)

    def results():
        out, lse = sparse_attention.forward(q, keys, 4, selection, SCALE)
        gradients = sparse_attention.backward(dout, q, keys, 4, out, lse, selection, SCALE)
        return out, lse, gradients.q, gradients.keys, sparse_attention.probabilities(q, keys, selection, lse, SCALE)

    expected = results()
    keys[6:] = torch.nan
    assert all(torch.equal(one, other) for one, other in zip(results(), expected, strict=True))


def test_same_bits_in_every_run():
    """Sums over queries, of which many select the same row, in one order."""
    q, keys, dout = torch.randn(300, 1, 8, 16), torch.randn(40, 1, 1, 16), torch.randn(300, 1, 8, 16)
    selection = torch.stack([torch.randperm(40)[:30].sort().values for _ in range(300)]).int()[:, None]
    out, lse = sparse_attention.forward(q, keys, 16, selection, SCALE)
    runs = [sparse_attention.backward(dout, q, keys, 16, out, lse, selection, SCALE) for _ in range(3)]
    assert all(torch.equal(runs[0].keys, each.keys) and torch.equal(runs[0].q, each.q) for each in runs)
