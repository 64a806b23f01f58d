"""Latent attention with a cache of latents: kv_lora_rank + qk_rope_head_dim numbers a token instead of keys
and values of all heads.

Prompts are read as in training: their keys and values are computed from the latents, whole rows of them under
context parallelism too. The next token of a row reads the cache without computing keys and values from it:
the product with the matrices that would make them moves to the query and to the output (DeepSeek-V2, 2.1.2),
each head h having [Kₕ; Vₕ] = Wᵇₕ:

    qₕ · (Kₕ c) = (Kₕᵀ qₕ) · c          Σ p (Vₕ c) = Vₕ (Σ p c)

So all heads attend to one shared key [c | rotated r], whose first part is the value. Communication: that of
the cache over cp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.model.latent_attention import LatentAttention

if TYPE_CHECKING:
    from megalite.generation.cache import CachedState


class LatentReader:
    """Attention of one layer with latent attention through the cache.

    Args:
        layer: its attention, whose weights do not change any more.
    """

    def __init__(self, layer: LatentAttention):
        self.layer, self.plain = layer, layer.model_config.qk_nope_head_dim
        self._matrix: Tensor | None = None

    def attend(self, x: Tensor, state: CachedState) -> Tensor:
        """Compute the output of this rank's heads, [seq, batch, heads/tp, value_size].

        x: [seq, batch, hidden].
        """
        layer, cache = self.layer, state.cache
        queries, (latent, key) = layer.queries(x, state), layer.latent(x, state)
        options = layer.operation(state)
        # [seq, batch, kv_lora_rank + qk_rope_head_dim]
        whole = cache.whole(torch.cat((latent, key), -1), options)
        cache.store(layer.layer, whole.unsqueeze(2), whole.unsqueeze(2))
        if cache.reads_prompts:
            whole_latent, whole_key = whole.split((latent.shape[-1], key.shape[-1]), -1)
            k, v = layer.keys_and_values(whole_latent, whole_key, None)
            return cache.within_prompts(queries, k, v, options)
        # [1, batch, heads, kv_lora_rank]
        out = cache.look_up(layer.layer, self._absorbed(queries), options)
        return torch.einsum("sbhr,hvr->sbhv", out, self.matrix[:, self.plain :])

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
            whole = weight.tensor
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
