"""Latent attention with a cache of latents: kv_lora_rank + qk_rope_head_dim numbers a token instead of keys and values of all heads.

Prompts are read as in training. The next token of a row reads the cache without computing keys and values from it: the product with the
matrices that would make them moves to the query and to the output (DeepSeek-V2, 2.1.2), each head h having [Kₕ; Vₕ] = Wᵇₕ:

    qₕ · (Kₕ c) = (Kₕᵀ qₕ) · c          Σ p (Vₕ c) = Vₕ (Σ p c)

So all heads attend to one shared key [c | rotated r], whose first part is the value. Communication: that of the cache over cp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megalite_kernels.rotary import rotate
from torch import Tensor

from megalite.model.latent_attention import LatentAttention

if TYPE_CHECKING:
    from megalite.generation.cache import CachedState


class LatentReader:
    """One layer's attention through the cache.

    Args:
        layer: its attention, whose weights do not change any more.
    """

    def __init__(self, layer: LatentAttention):
        self.layer, self.plain = layer, layer.model_config.qk_nope_head_dim
        self._matrix: Tensor | None = None

    def attend(self, x: Tensor, state: CachedState) -> Tensor:
        """The output of this rank's heads, [seq, batch, heads/tp, value_size], of x [seq, batch, hidden]."""
        layer, cache = self.layer, state.cache
        queries, (latent, key) = layer.queries(x, state), layer.latent(x, state)
        options, tables = layer.operation(state), layer.rotary(state)
        rotated = key.unsqueeze(2) if tables is None else rotate(key.unsqueeze(2), *tables)
        kept = torch.cat((latent.unsqueeze(2), rotated), -1)  # [seq, batch, 1, kv_lora_rank + qk_rope_head_dim]
        kept = cache.whole(kept, options)
        cache.store(layer.layer, kept, kept)
        if cache.reads_prompts:
            q, k, v = layer.heads_of(queries, latent, key, state)
            return cache.within_prompts(q, cache.whole(k, options), cache.whole(v, options), options)
        found = cache.look_up(layer.layer, self._absorbed(queries, tables), options)  # [1, batch, heads, kv_lora_rank]
        return torch.einsum("sbhr,hvr->sbhv", found, self.matrix[:, self.plain :])

    def _absorbed(self, queries: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        """Queries for the shared key: [seq, batch, heads · head_size] -> [seq, batch, heads, kv_lora_rank + qk_rope_head_dim]."""
        by_head = queries.unflatten(-1, (self.layer.heads, -1))
        turning = by_head[..., self.plain :]
        absorbed = torch.einsum("sbhn,hnr->sbhr", by_head[..., : self.plain], self.matrix[:, : self.plain])
        return torch.cat((absorbed, turning if tables is None else rotate(turning, *tables)), -1)

    @property
    def matrix(self) -> Tensor:
        """Wᵇ of this rank's heads, [heads, plain + value_size, kv_lora_rank], with its adapter, if it has one."""
        if self._matrix is None:
            weight = self.layer.kv_up.weight
            whole = weight.tensor
            if weight.adapter is not None:  # the product with each unit vector, which needs no knowledge of the adapter
                whole = self.layer.kv_up(torch.eye(whole.shape[1], dtype=whole.dtype, device=whole.device).unsqueeze(1)).squeeze(1).t()
            self._matrix = whole.unflatten(0, (self.layer.heads, -1))
        return self._matrix
