"""Indexed attention with a cache of latents, and of the indexer's keys.

These are index_head_dim more numbers a token in layers with an indexer. Prompts are read as in training. The
next token of a row, or the next part of a prompt, is scored with the cached keys of its row, and attends to
the selected latents in the absorbed form of `latent_attention.cache`. Shared layers have the selection of the
pass in its state. Communication: that of the cache over cp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from megalite_kernels import sparse_attention
from megalite_kernels.index_scores import select
from torch import Tensor

from megalite.model.block_module import BlockModule
from megalite.model.blocks.attention.cache import KeyValueStore, within_prompts
from megalite.model.blocks.indexed_attention.block import IndexedAttention
from megalite.model.blocks.latent_attention.cache import CachedLatentAttention
from megalite.model.forward_state import ForwardState
from megalite.model.row_cache import CachedBlock, RowCache, with_past


class IndexedStore(NamedTuple):
    """One layer's latents and shared keys, and its indexer's keys, [rows, 1, slots + 1, index_head_dim].

    In a shared layer the indexer has no keys: None.
    """

    keys: Tensor
    values: Tensor
    index_keys: Tensor | None

    @property
    def latents(self) -> KeyValueStore:
        return KeyValueStore(self.keys, self.values)

    @property
    def nbytes(self) -> int:
        return self.latents.nbytes + (0 if self.index_keys is None else self.index_keys.nbytes)


def _with_earlier(stored: Tensor, own: Tensor, cache: RowCache) -> Tensor:
    """Store what the current pass has computed, and return it for all positions up to its end.

    Args:
        stored: [rows, 1, slots + 1, dim].
        own: [seq, rows, dim].

    Returns:
        [positions, rows, dim].
    """
    own = own.unsqueeze(2)
    known = with_past(stored, own, cache.start) if cache.reads_prompts else None
    KeyValueStore(stored, stored).write(cache, own, own)
    if known is None:
        empty = cache.slots(stored.shape[2] - 1).empty
        assert empty is not None
        known = stored[:, :, : empty.shape[-1]].permute(2, 0, 1, 3)
    return known.squeeze(2)


class CachedIndexedAttention(CachedLatentAttention):
    """Indexed attention through the cache."""

    def __init__(self, attention: IndexedAttention):
        super().__init__(attention)
        self.indexed = attention

    def new_store(  # type: ignore[override]
        self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> IndexedStore:
        latents = super().new_store(rows, capacity, dtype, device)
        if self.indexed.indexer is None:
            return IndexedStore(*latents, None)
        width = self.indexed.model_config.index_head_dim
        index_keys = torch.zeros(rows, 1, latents.slots + 1, width, dtype=dtype, device=device)
        return IndexedStore(*latents, index_keys)

    def attend(self, x: Tensor, state: ForwardState, cache: RowCache) -> tuple[Tensor]:
        layer, store = self.indexed, cache.stores[self]
        query_latent = layer.query_latent(x, state)
        queries, latent = layer.queries(query_latent, state), torch.cat(layer.latent(x, state), -1)
        rows = _with_earlier(store.keys, cache.whole(latent, state.part), cache)  # [positions, rows, width]
        selects = len(rows) > layer.top
        if layer.indexer is not None:
            tables = layer.rotary_tables(state)
            index_queries, index_keys, weights = layer.indexer.of_own_tokens(x, query_latent, tables)
            index_keys = _with_earlier(store.index_keys, cache.whole(index_keys, state.part), cache)
            if selects:
                state.selections[layer.layer] = select(
                    index_queries, index_keys, weights, top=layer.top, positions=state.positions
                )
        selection = state.selections[layer.selecting] if selects else None
        if cache.reads_prompts and (selection is None or not cache.continues):
            return (self._of_prompts(queries, rows, selection, state, cache),)
        queries = self._absorbed(queries)
        if selection is None:
            out = store.latents.look_up(cache, queries, layer.attention_options(state))
        else:
            width = rows.shape[-1] - layer.model_config.qk_rope_head_dim
            out, _ = sparse_attention.forward(queries, rows.unsqueeze(2), width, selection, layer.scale)
        return (torch.einsum("sbhr,hvr->sbhv", out, self.matrix[:, self.plain :]),)

    def _of_prompts(
        self, queries: Tensor, rows: Tensor, selection: Tensor | None, state: ForwardState, cache: RowCache
    ) -> Tensor:
        """Return the output of this rank's heads by their keys and values, [seq, batch, heads/tp,
        value_size]."""
        layer = self.indexed
        rotating = layer.model_config.qk_rope_head_dim
        latents, keys = rows.split((rows.shape[-1] - rotating, rotating), -1)
        k, v = layer.keys_and_values(latents, keys, None)
        if selection is None:
            return within_prompts(queries, k, v, layer.attention_options(state), cache.start)
        return sparse_attention.forward(queries, k, v, selection, layer.scale)[0]


def cached(block: BlockModule) -> CachedBlock:
    """Return the block that generation uses, see `BlockKind.cached`."""
    assert isinstance(block, IndexedAttention)
    return CachedIndexedAttention(block)
