"""The key-value cache: keys and values of the tokens that a model has read, so that the next token of a row
costs one position.

Position p of a row is stored in slot p mod slots. A layer with a sliding window has as many slots as the
window: a token overwrites the one that has just left the window. So the next token of a row attends to the
first min(length, slots) slots in every layer. Their order does not matter: keys are rotated before they are
stored.

Rows may have different lengths. Prompts are read with the attention of training, padded after their ends,
where causal attention never looks. Each tp rank stores the heads that it computes, each stage its layers.
Each cp rank stores whole rows: of a prompt it computes its part, attends with it to gathered keys and values
(`parallel.context.gathered`), and keeps these. Nothing else here communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from megalite_kernels.attention import attention
from megalite_kernels.attention_part import attention_part
from torch import Tensor, nn

from megalite.generation.latent_cache import LatentReader
from megalite.mesh.mesh import MeshAxis
from megalite.model.attention import Attention
from megalite.model.forward_state import ForwardState
from megalite.model.latent_attention import LatentAttention
from megalite.model.stage import Stage
from megalite.parallel.context.gathered import whole
from megalite.parallel.context.sinks import with_sinks

ROUND_UP = 64


def padded(length: int) -> int:
    """Round a length up to a multiple of ROUND_UP.

    Rotary tables and matrix-product kernels are reused if there are few shapes.
    """
    return -(-length // ROUND_UP) * ROUND_UP


class _Kept(NamedTuple):
    """One layer's keys and values, [batch, kv_heads/tp, slots + 1, head_dim]; the last slot is written with
    what is discarded.

    With latent attention there is one key, and values are a part of it: a view.
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def empty(layer: Attention, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> _Kept:
        model = layer.model_config
        if model.kv_lora_rank is not None:
            width = model.kv_lora_rank + model.qk_rope_head_dim
            keys = torch.zeros(rows, 1, slots + 1, width, dtype=dtype, device=device)
            return _Kept(keys, keys[..., : model.kv_lora_rank])
        shape = (rows, layer.kv_heads, slots + 1, model.head_size)
        return _Kept(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    @property
    def shared(self) -> bool:
        return self.values.data_ptr() == self.keys.data_ptr()

    @property
    def slots(self) -> int:
        return self.keys.shape[2] - 1


class _CacheSlots(NamedTuple):
    """The slots that store the tokens of one pass, and the slots that they attend to.

    Shared by the layers with the same number of slots.
    """

    rows: Tensor  # [batch, 1]
    slot: Tensor  # [batch, seq]
    # [batch, 1, 1, used slots]: slots not written yet; None for prompts, which attend only to themselves
    empty: Tensor | None


class KeyValueCache:
    """The cache of one stage for a batch of rows; its memory is allocated once.

    Args:
        rows: number of rows.
        capacity: maximum number of positions of a row.
    """

    def __init__(self, stage: Stage, rows: int, capacity: int, device: torch.device, cp: MeshAxis):
        self.rows, self.capacity, self.device, self.cp = rows, capacity, device, cp
        self._layers: dict[int, _Kept] = {}
        for module in stage.layers.values():
            layer = cast(CachedAttention, module.attention).attention
            slots = min(layer.model_config.window(layer.layer) or capacity, capacity)
            self._layers[layer.layer] = _Kept.empty(layer, rows, slots, stage.dtype, device)
        self._places: dict[int, _CacheSlots] = {}  # by number of slots, for the current pass

    @property
    def nbytes(self) -> int:
        return sum(
            stored.keys.nbytes + (0 if stored.shared else stored.values.nbytes)
            for stored in self._layers.values()
        )

    def begin_prompts(self, lengths: list[int], padded: int) -> None:
        """Prepare a pass that reads every row from its start, padded to one length. Clears the cache.

        lengths: the number of tokens of each row.
        """
        stop = self._column(lengths)
        position = torch.arange(padded, device=self.device)

        def place(slots: int) -> tuple[Tensor, None]:
            last = (position < stop) & (position >= stop - slots)  # [rows, padded]
            # padding and what the window has left go to the last slot
            return torch.where(last, position % slots, slots), None

        self._begin(place)

    def begin_tokens(self, positions: list[int]) -> None:
        """Prepare a pass that reads one token of each row at these positions.

        All earlier positions must have been read.
        """
        position = self._column(positions)

        def place(slots: int) -> tuple[Tensor, Tensor]:
            used = torch.arange(min(padded(max(positions) + 1), slots), device=self.device)
            return position % slots, (used > position)[:, None, None]

        self._begin(place)

    def _begin(self, place: Callable[[int], tuple[Tensor, Tensor | None]]) -> None:
        rows = self._column(list(range(self.rows)))
        self._places = {
            slots: _CacheSlots(rows, *place(slots))
            for slots in {stored.slots for stored in self._layers.values()}
        }

    def _column(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.device).unsqueeze(1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Store k and v [seq, batch, kv_heads/tp, head_dim]; return the attention output of q [seq, batch,
        heads/tp, head_dim], same shape.

        options: those of the attention operation. With `part`, all three are of this cp rank's part of the
        rows.
        """
        k, v = (self.whole(x, options) for x in (k, v))
        self.store(layer, k, v)
        return (
            self.within_prompts(q, k, v, options) if self.reads_prompts else self.look_up(layer, q, options)
        )

    def whole(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        """All-gather whole rows [seq, …] from this cp rank's part. Without parts x is whole."""
        return x if "part" not in options else whole(x, self.cp, options["part"])

    def within_prompts(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the attention of rows, or this cp rank's part, to whole rows from their start."""
        part, sinks = options.get("part"), options.get("sinks")
        if part is None and sinks is None:
            return attention(q, k, v, **options)[0]
        requested = {name: options[name] for name in ("scale", "window", "softcap")}
        out, lse = attention_part(
            q, k, v, [(0, len(q))] if part is None else part.segments[part.rank], [(0, len(k))], **requested
        )
        return with_sinks(out, lse, sinks)[0].to(q.dtype)

    @property
    def reads_prompts(self) -> bool:
        """Return whether the current pass reads rows from their start, which attend only to themselves."""
        return all(place.empty is None for place in self._places.values())

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v [seq, batch, kv_heads/tp, head_dim] at the positions of the current pass."""
        stored = self._layers[layer]
        place = self._places[stored.slots]
        stored.keys[place.rows, :, place.slot] = k.transpose(0, 1)
        if not stored.shared:
            stored.values[place.rows, :, place.slot] = v.transpose(0, 1)

    def look_up(self, layer: int, q: Tensor, options: dict[str, Any]) -> Tensor:
        """The attention output of one token of each row, q [1, batch, heads/tp, head_dim], to what is
        stored."""
        stored = self._layers[layer]
        place = self._places[stored.slots]
        assert place.empty is not None
        used = place.empty.shape[-1]
        return _attend(q, stored.keys[:, :, :used], stored.values[:, :, :used], place.empty, options)


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


@dataclass(kw_only=True)
class CachedState(ForwardState):
    """The state of a forward pass that reads and extends a cache."""

    cache: KeyValueCache


class CachedAttention(nn.Module):
    """An attention layer that uses the cache of a `CachedState`, and is unchanged without one."""

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.latents = LatentReader(attention) if isinstance(attention, LatentAttention) else None

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        if not isinstance(state, CachedState):
            return self.attention(x, state)
        if self.latents is not None:
            return self.attention.out(self.latents.attend(x, state).flatten(-2))
        q, k, v = self.attention.project(x, state)
        out = state.cache.attend(self.attention.layer, q, k, v, self.attention.operation(state))
        return self.attention.out(out.flatten(-2))
