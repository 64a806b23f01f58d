"""Latent attention with a cache of latents: kv_lora_rank + qk_rope_head_dim numbers a token instead of keys
and values of all heads.

Prompts are read as in training: their keys and values are computed from the latents, whole rows of them under
context parallelism too, and in a part of prompts from those of the parts before it. The next token of a row
reads the cache without computing keys and values from it: the product with the matrices that would make them
moves to the query and to the output (DeepSeek-V2, 2.1.2), each head h having [Kₕ; Vₕ] = Wᵇₕ:

    qₕ · (Kₕ c) = (Kₕᵀ qₕ) · c          Σ p (Vₕ c) = Vₕ (Σ p c)

So all heads attend to one shared key [c | rotated r], whose first part is the value. Communication: that of
the cache over cp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.model.block_module import BlockModule
from megalite.model.blocks.attention.cache import CachedAttention, KeyValueStore, within_prompts
from megalite.model.blocks.latent_attention.block import LatentAttention
from megalite.model.blocks.latent_attention.context import latent_width
from megalite.model.forward_state import ForwardState
from megalite.model.row_cache import CachedBlock, RowCache, with_past


class CachedLatentAttention(CachedAttention):
    """Latent attention through the cache.

    Args:
        attention: its weights do not change any more.
    """

    def __init__(self, attention: LatentAttention):
        super().__init__(attention)
        self.layer, self.plain = attention, attention.model_config.qk_nope_head_dim
        self._matrix: Tensor | None = None

    def new_store(self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> KeyValueStore:
        model = self.layer.model_config
        slots = min(model.window(self.layer.layer) or capacity, capacity)
        keys = torch.zeros(rows, 1, slots + 1, latent_width(model), dtype=dtype, device=device)
        return KeyValueStore(keys, keys[..., : model.kv_lora_rank])

    def attend(self, x: Tensor, state: ForwardState, cache: RowCache) -> tuple[Tensor]:
        """Return the output of this rank's heads, [seq, batch, heads/tp, value_size]."""
        layer, store, options = self.layer, cache.stores[self], self.layer.attention_options(state)
        queries = layer.queries(layer.query_latent(x, state), state)
        latent, key = layer.latent(x, state)
        # [seq, batch, kv_lora_rank + qk_rope_head_dim]
        whole = cache.whole(torch.cat((latent, key), -1), state.part)
        seen = with_past(store.keys, whole.unsqueeze(2), cache.start) if cache.reads_prompts else None
        store.write(cache, whole.unsqueeze(2), whole.unsqueeze(2))
        if seen is not None:
            latents, shared = seen.squeeze(2).split((latent.shape[-1], key.shape[-1]), -1)
            k, v = layer.keys_and_values(latents, shared, None)
            return (within_prompts(queries, k, v, options, cache.start),)
        # [1, batch, heads, kv_lora_rank]
        out = store.look_up(cache, self._absorbed(queries), options)
        return (torch.einsum("sbhr,hvr->sbhv", out, self.matrix[:, self.plain :]),)

    def _absorbed(self, queries: Tensor) -> Tensor:
        """Queries for the shared key: [seq, batch, heads, head_size] -> [seq, batch, heads, kv_lora_rank +
        qk_rope_head_dim]."""
        absorbed = torch.einsum("sbhn,hnr->sbhr", queries[..., : self.plain], self.matrix[:, : self.plain])
        return torch.cat((absorbed, queries[..., self.plain :]), -1)

    @property
    def matrix(self) -> Tensor:
        """Wᵇ of this rank's heads, [heads, plain + value_size, kv_lora_rank], with its adapter, if it has
        one."""
        if self._matrix is None:
            weight = self.layer.kv_up.weight
            whole = weight.matmuls.values()
            # the product with each unit vector, which needs no knowledge of the adapter
            if weight.adapter is not None:
                whole = (
                    self.layer.kv_up(
                        torch.eye(whole.shape[1], dtype=whole.dtype, device=whole.device).unsqueeze(1)
                    )
                    .squeeze(1)
                    .t()
                )
            self._matrix = whole.unflatten(0, (self.layer.heads, -1))
        return self._matrix


def cached(block: BlockModule) -> CachedBlock:
    """Return the block that generation uses, see `BlockKind.cached`."""
    assert isinstance(block, LatentAttention)
    return CachedLatentAttention(block)
