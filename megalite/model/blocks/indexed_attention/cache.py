"""Indexed attention with a cache of latents, and of the indexer's keys.

These are index_head_dim more numbers a token in layers with an indexer. Prompts are read as in training. The
next token of a row is scored with the cached keys of its row, and attends to the selected latents in the
absorbed form of `latent_attention.cache`. Shared layers have the selection of the pass in its state.
Communication: that of the cache over cp.
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
from megalite.model.row_cache import CachedBlock, RowCache


class IndexedStore(NamedTuple):
    """One layer's latents and shared keys, and its indexer's keys, [rows, slots + 1, index_head_dim].

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
        index_keys = torch.zeros(rows, latents.slots + 1, width, dtype=dtype, device=device)
        return IndexedStore(*latents, index_keys)

    def attend(self, x: Tensor, state: ForwardState, cache: RowCache) -> tuple[Tensor]:
        layer, store = self.indexed, cache.stores[self]
        query_latent = layer.query_latent(x, state)
        queries, (latent, key) = layer.queries(query_latent, state), layer.latent(x, state)
        whole = cache.whole(torch.cat((latent, key), -1), state.part)
        store.latents.write(cache, whole.unsqueeze(2), whole.unsqueeze(2))
        place = cache.slots(store.latents.slots)
        scored = None
        if layer.indexer is not None:
            index_queries, index_keys, weights = layer.indexer.of_own_tokens(
                x, query_latent, layer.rotary_tables(state)
            )
            index_keys = cache.whole(index_keys, state.part)
            store.index_keys[place.rows, place.slot] = index_keys.transpose(0, 1)
            scored = index_queries, index_keys, weights
        if cache.reads_prompts:
            return (self._of_prompts(queries, whole, scored, state),)
        assert place.empty is not None
        used = place.empty.shape[-1]
        if used <= layer.top:
            out = store.latents.look_up(cache, self._absorbed(queries), layer.attention_options(state))
        else:
            if scored is not None:
                stored = store.index_keys[:, :used].transpose(0, 1)
                self._select(scored[0], stored, scored[2], cache.ends.t() - 1, None, state)
            rows = store.latents.keys[:, :, :used].permute(2, 0, 1, 3)  # [used, rows, 1, width]
            selection = state.selections[layer.selecting]
            out, _ = sparse_attention.forward(
                self._absorbed(queries), rows, latent.shape[-1], selection, layer.scale
            )
        return (torch.einsum("sbhr,hvr->sbhv", out, self.matrix[:, self.plain :]),)

    def _of_prompts(
        self,
        queries: Tensor,
        whole: Tensor,
        scored: tuple[Tensor, Tensor, Tensor] | None,
        state: ForwardState,
    ) -> Tensor:
        """Return the output of this rank's heads for prompts, [seq, batch, heads/tp, value_size]."""
        layer = self.indexed
        widths = (whole.shape[-1] - layer.model_config.qk_rope_head_dim, layer.model_config.qk_rope_head_dim)
        latents, keys = whole.split(widths, -1)
        k, v = layer.keys_and_values(latents, keys, None)
        if len(k) <= layer.top:
            return within_prompts(queries, k, v, layer.attention_options(state))
        if scored is not None:
            self._select(*scored, state.positions, state.document_start, state)
        out, _ = sparse_attention.forward(queries, k, v, state.selections[layer.selecting], layer.scale)
        return out

    def _select(
        self,
        queries: Tensor,
        keys: Tensor,
        weights: Tensor,
        positions: Tensor,
        starts: Tensor | None,
        state: ForwardState,
    ) -> None:
        layer = self.indexed
        state.selections[layer.layer] = select(
            queries, keys, weights, top=layer.top, positions=positions, document_start=starts
        )


def cached(block: BlockModule) -> CachedBlock:
    """Return the block that generation uses, see `BlockKind.cached`."""
    assert isinstance(block, IndexedAttention)
    return CachedIndexedAttention(block)
