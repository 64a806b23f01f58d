"""Keys and values that attention keeps in generation.

A layer with a sliding window has as many slots as the window. The order of slots does not matter: keys are
rotated before they are stored. Prompts are read with the attention of training; a part of them also attends
to what is stored of the parts before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megalite_kernels.attention import attention
from megalite_kernels.attention_part import attention_part
from torch import Tensor

from megalite.model.block_module import BlockModule
from megalite.model.blocks.attention.block import Attention
from megalite.model.forward_state import ForwardState
from megalite.model.row_cache import CachedBlock, CachedState, RowCache, with_past
from megalite.parallel.context.sinks import with_sinks


class KeyValueStore(NamedTuple):
    """One layer's keys and values, [batch, kv_heads/tp, slots + 1, head_dim], values value_dim wide; the last
    slot is written with what is discarded.

    With latent attention there is one key, and values are a part of it: a view.
    """

    keys: Tensor
    values: Tensor

    @property
    def shared(self) -> bool:
        return self.values.data_ptr() == self.keys.data_ptr()

    @property
    def slots(self) -> int:
        return self.keys.shape[2] - 1

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + (0 if self.shared else self.values.nbytes)

    def write(self, cache: RowCache, k: Tensor, v: Tensor) -> None:
        """Store k and v [seq, batch, kv_heads/tp, head_dim] at the positions of the current pass."""
        place = cache.slots(self.slots)
        self.keys[place.rows, :, place.slot] = k.transpose(0, 1)
        if not self.shared:
            self.values[place.rows, :, place.slot] = v.transpose(0, 1)

    def look_up(self, cache: RowCache, q: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the attention output of one token of each row, q [1, batch, heads/tp, head_dim], to what is
        stored."""
        empty = cache.slots(self.slots).empty
        assert empty is not None
        used = empty.shape[-1]
        return _attend(q, self.keys[:, :, :used], self.values[:, :, :used], empty, options)


def _attend(q: Tensor, keys: Tensor, values: Tensor, empty: Tensor, options: dict[str, Any]) -> Tensor:
    """softmax(scale · q kᵀ) v for one query of each row, q [1, batch, heads, head_dim]; scores in at least
    fp32."""
    scale, softcap, sinks = options["scale"], options["softcap"], options.get("sinks")
    query = q[0].unflatten(1, (keys.shape[1], -1))  # [batch, kv_heads, heads per kv_head, head_dim]
    scores = (query @ keys.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores.masked_fill_(empty, -torch.inf)
    if sinks is not None:  # one more score, without a value
        scores = torch.cat(
            (
                scores,
                sinks.tensor.to(scores.dtype).view(scores.shape[1:3]).expand(scores.shape[:3]).unsqueeze(-1),
            ),
            -1,
        )
    probabilities = torch.softmax(scores, -1).to(q.dtype)[..., : keys.shape[2]]
    return (probabilities @ values).flatten(1, 2).unsqueeze(0)


def within_prompts(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], start: int = 0) -> Tensor:
    """Compute the attention of rows, or this cp rank's part, to whole rows.

    Args:
        start: the first position of whole rows of q. Those of k and v may begin earlier (`with_past`), and
            end where they end.
    """
    part, sinks = options.get("part"), options.get("sinks")
    if part is None and sinks is None and start == 0:
        return attention(q, k, v, **options)[0]
    requested = {name: options[name] for name in ("scale", "window", "softcap")}
    parts = [[(0, len(q))]] if part is None else part.segments
    end = start + sum(length for segments in parts for _, length in segments)
    own = parts[0 if part is None else part.rank]
    queries, keys = [(start + first, length) for first, length in own], [(end - len(k), len(k))]
    out, lse = attention_part(q, k, v, queries, keys, **requested)
    return with_sinks(out, lse, sinks)[0].to(q.dtype)


class CachedAttention(CachedBlock):
    """Attention that uses the cache of a `CachedState`, and is unchanged without one."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention

    def new_store(self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> KeyValueStore:
        layer = self.attention
        slots = min(layer.model_config.window(layer.layer) or capacity, capacity)
        shapes = ((rows, layer.kv_heads, slots + 1, size) for size in (layer.head_dim, layer.value_dim))
        return KeyValueStore(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        if not isinstance(state, CachedState):
            return self.attention(x, state)
        out, *gates = self.attend(x, state, state.cache)
        output: Tensor = self.attention.last(out.flatten(-2), *gates)
        return output

    def attend(self, x: Tensor, state: ForwardState, cache: RowCache) -> tuple[Tensor, ...]:
        """Return the output of this rank's heads, [seq, batch, heads/tp, head_dim], and its gate, if any.

        Args:
            x: [seq, batch, hidden]; of a prompt, this cp rank's part.
        """
        store, options = cache.stores[self], self.attention.attention_options(state)
        q, k, v, *gates = self.attention.project(x, state)
        k, v = (cache.whole(each, state.part) for each in (k, v))
        if not cache.reads_prompts:
            store.write(cache, k, v)
            return store.look_up(cache, q, options), *gates
        keys, values = with_past(store.keys, k, cache.start), with_past(store.values, v, cache.start)
        store.write(cache, k, v)
        return within_prompts(q, keys, values, options, cache.start), *gates


def cached(block: BlockModule) -> CachedBlock:
    """Return the block that generation uses, see `BlockKind.cached`."""
    assert isinstance(block, Attention)
    return CachedAttention(block)
