"""The description of each unit of the model, for one tensor-parallel rank and one microbatch.

The steps are those of `megalite.model` and `megalite.parallel.tensor`; each tensor that their autograd
functions save is a Buffer, each storage counted once. Shapes of weights are those of the stored parameters
(`megalite.model.parameters`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from megalite.config.sections.lora import PROJECTIONS, LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.mesh.layout import Coordinates
from megalite.model.cost import context_parallel
from megalite.model.cost.records import (
    AttentionCost,
    BlockCost,
    Buffer,
    Elementwise,
    EmbeddingLookup,
    LocalMatmul,
    Matmul,
    Share,
    SharedKeyMatmul,
    UnitCost,
)
from megalite.model.parameters import head_unit, kv_replicas, model_specs, padded_vocabulary

LOSS_CHUNK_ON_GPU = 4096
"""Tokens whose logits exist at a time on a GPU, unless train.loss_chunk says otherwise: adding a chunk to the
fp32 weight gradient then takes 1/20 of the time of the chunk's matmuls."""
ATTENTION_BLOCK = 64  # queries per block of the reference in `megalite_kernels.attention`


class Units:
    """Describes the units of a model.

    Args:
        share: the part of the model and of a batch.
        lora: adapters; with a rank all other weights are frozen.
        flash: attention runs a kernel that keeps one number per query and head instead of probabilities.
    """

    def __init__(self, model: ModelConfig, share: Share, lora: LoraConfig | None = None, flash: bool = True):
        self.model, self.share, self.lora, self.flash = model, share, lora or LoraConfig(), flash
        self.own = share.own_tokens * model.hidden_size  # elements of [sequence (/tp), batch, hidden]
        self.whole = share.tokens * model.hidden_size  # elements of [sequence, batch, hidden]
        self._layers: dict[Hashable, UnitCost] = {}

    def unit(self, number: int) -> UnitCost:
        """The unit of a number: 0 is the embedding, 1 … L are the layers, L + 1 is the head, without modules
        of multi-token prediction."""
        if number == 0:
            return self.embedding()
        return self.head() if number == head_unit(self.model) else self.layer(number - 1)

    def alike(self, index: int) -> Hashable:
        """A key: layers with equal keys have equal descriptions."""
        return self.model.window(index), self.model.is_mixture(index)

    def layer(self, index: int) -> UnitCost:
        """A transformer layer, 0-based."""
        key = self.alike(index)
        if key not in self._layers:
            products = self._layer_products(index)
            self._layers[key] = UnitCost(
                (self._attention_block(index, products), self._transformation(index, products))
            )
        return self._layers[key]

    def embedding(self) -> UnitCost:
        """The vocabulary table, and learned positions. Kept are the token ids, and a mask of those whose rows
        are on other ranks."""
        model, share = self.model, self.share
        table = self._vocabulary * model.hidden_size
        positions = model.position == "learned"
        kept = [
            Buffer("tokens", share.tokens, "index"),
            Buffer("tokens of other ranks", share.tokens, "mask"),
        ]
        kept += [Buffer("positions", share.sequence, "index")] if positions else []
        kept += self._dropout(model.embedding_dropout)
        weights = table + (model.hidden_size * model.max_position_embeddings if positions else 0)
        return UnitCost(
            (
                BlockCost(
                    Elementwise(),
                    (
                        EmbeddingLookup(
                            share.tokens, model.hidden_size, weights, self._frozen("embedding"), tuple(kept)
                        ),
                    ),
                ),
            )
        )

    def head(self) -> UnitCost:
        """The final norm and the logits. What the loss keeps depends on how it is computed and is not
        included."""
        model = self.model
        name = "embedding" if model.tie_word_embeddings else "head"
        weights = model.vocabulary * model.hidden_size
        product = Matmul(
            name,
            self.share.tokens,
            self._vocabulary,
            model.hidden_size,
            weights,
            "outputs",
            self._frozen(name),
        )
        scale = () if model.logit_scale is None else (2 * self.own,)
        kept = (Buffer("residual stream", self.own), *self._norm_buffers(product))
        norm = Elementwise((2 * self.own, *scale), (3 * self.own, *scale), kept)
        return UnitCost(
            (BlockCost(norm, (product,), workspace=(Buffer("gradients of the norm", 2 * self.whole),)),)
        )

    def _frozen(self, module: str) -> bool:
        return self.lora.rank > 0 and module not in (self.lora.modules_to_save or ())

    @property
    def _vocabulary(self) -> int:
        """Rows of the padded vocabulary on this rank."""
        return padded_vocabulary(self.model.vocabulary, self.share.tp) // self.share.tp

    @property
    def heads(self) -> context_parallel.Heads:
        """The heads of one tensor-parallel rank."""
        model, share, tp = self.model, self.share, self.share.tp
        kv = model.kv_heads * kv_replicas(model, tp) // tp
        method = share.context if share.context_inner == 1 else "ulysses"  # two levels exchange heads first
        travels = context_parallel.latents_travel(model, method, share.cp, tp, share.sequence_parallel)
        latent = (model.kv_lora_rank or 0) + model.qk_rope_head_dim if travels else 0
        return context_parallel.Heads(
            model.num_attention_heads // tp, kv, model.head_size, model.value_size, latent
        )

    @property
    def exchanges(self) -> tuple[tuple[int, context_parallel.ContextExchange], ...]:
        """What a layer's attention exchanges over cp, or over each of its two levels, with the number of
        ranks there."""
        return tuple(
            (share.cp, context_parallel.exchange(share, heads))
            for share, heads in context_parallel.levels(self.share, self.heads)
        )

    # --- a layer
    # --------------------------------------------------------------------------------------------------------

    def _layer_products(self, index: int) -> dict[str, Matmul]:
        """The products of all tokens with each of a layer's weights, by name."""
        lora, tp, found = self.lora, self.share.tp, {}
        prefix = f"layers.{index}."  # the last unit may have several layers
        for spec in model_specs(self.model, tp=tp, units=[min(index + 1, head_unit(self.model))]):
            segments = [
                segment
                for segment in spec.segments
                if segment.role in PROJECTIONS and segment.name.startswith(prefix)
            ]
            if not segments:
                continue
            name = spec.name.removeprefix(prefix).removesuffix(".weight")
            outputs, inputs = spec.local_shape(Coordinates.on("tp", 0, tp))
            adapted = [segment for segment in segments if lora.adapts(segment.role)]
            product = Matmul(
                name,
                self.share.tokens,
                outputs,
                inputs,
                sum(segment.numel for segment in segments),
                "inputs" if segments[0].split == 1 else "outputs",
                frozen=bool(lora.rank),
                adapter_rank=sum(lora.rank_of(segment.role) for segment in adapted),
                adapter_weights=sum(lora.rank_of(segment.role) * sum(segment.shape) for segment in adapted),
                adapter_outputs=outputs if lora.dora and adapted else 0,
            )
            found[name] = product if segments[0].split is not None else self._of_own_tokens(product)
        return found

    def _of_own_tokens(self, product: Matmul) -> Matmul:
        """The product of each rank's own tokens with a whole matrix, which makes a latent."""
        own, travels = self.share.own_tokens, self.heads.latent > 0
        shared = self.model.qk_rope_head_dim if product.name == "attention.kv_a" and not travels else 0
        fields: dict[str, Any] = {**vars(product), "rows": own, "ranks": self.share.tokens // own}
        return SharedKeyMatmul(**fields, shared=shared) if shared else LocalMatmul(**fields)

    def _attention_block(self, index: int, products: dict[str, Matmul]) -> BlockCost:
        if self.model.kv_lora_rank is not None:
            from megalite.model.cost.latents import latent_block

            return latent_block(self, index, products)
        model, share, tokens = self.model, self.share, self.share.tokens
        qkv, out = products["attention.qkv"], products["attention.out"]
        heads, kv_heads, packed = self.heads.query, self.heads.kv, qkv.outputs
        query = heads * model.head_size
        normed: tuple[Buffer, ...] = ()
        if model.qk_norm != "none":
            statistics = {"full": 2, "head": heads + kv_heads, "each_head": 2 * (heads + kv_heads)}[
                model.qk_norm
            ]
            normed = (
                Buffer("normed queries and keys", tokens * (heads + kv_heads) * model.head_size),
                Buffer("their statistics", tokens * statistics, "accumulate"),
            )
        moved = (2 * tokens * packed,) * (2 if normed else 1)
        rotary = Elementwise(moved, moved, normed, summed=2 * tokens if model.qk_norm == "full" else 0)
        attention = self.attention(index)
        workspace = [
            Buffer("gradients of attention", tokens * (query + 2 * packed)),
            *context_parallel.workspace(share, self.heads),
        ]
        if not self.flash:  # the reference works on copies of at least fp32
            workspace.append(Buffer("copies of the reference", tokens * 2 * (query + packed), "accumulate"))
        before, after = self.around(qkv, is_first=True)
        return BlockCost(before, (qkv, rotary, attention, out), after, self.dropped, tuple(workspace))

    def attention(self, index: int) -> AttentionCost:
        """Attention itself, between the projections."""
        model, share, heads = self.model, self.share, self.heads
        kept = (*context_parallel.kept(share, heads), *self._probabilities(index, heads.query))
        return AttentionCost(
            share.batch,
            share.row,
            heads.query,
            heads.size,
            heads.value_size,
            model.window(index),
            kept,
            share.cp,
        )

    def _transformation(self, index: int, products: dict[str, Matmul]) -> BlockCost:
        if not self.model.is_mixture(index):
            return self.feed_forward(products["mlp.in"], products["mlp.down"])
        from megalite.model.cost.mixtures import mixture_block

        return mixture_block(self, products)

    def feed_forward(self, into: Matmul, down: Matmul) -> BlockCost:
        """The block of a dense feed-forward."""
        tokens = self.share.tokens
        inner = tokens * down.inputs
        forward, backward = (3, 6) if self.model.gated_mlp else (2, 4)
        # The activation's input is kept; its output is recomputed.
        activation = Elementwise(
            (forward * inner,),
            (backward * inner,),
            (Buffer("input of the activation", tokens * into.outputs),),
        )
        workspace = Buffer("gradients of the feed-forward", self.whole + 2 * inner + tokens * into.outputs)
        before, after = self.around(into, is_first=False)
        return BlockCost(before, (into, activation, down), after, self.dropped, (workspace,))

    def around(self, column: Matmul, is_first: bool) -> tuple[Elementwise, Elementwise]:
        """The residual sum with its fused norm, and the norm of the output. `is_first`: the block's input is
        the layer's input."""
        model, placement, own = self.model, self.model.norm_placement, self.own
        width = model.hidden_size * (2 if model.norm == "layer" and model.norm_bias else 1)
        scale = (2 * own,) if model.residual_multiplier != 1.0 else ()
        if model.parallel_block != "none" and not is_first:  # the layer's input is kept already
            shared = model.parallel_block == "shared_norm"
            addition = Elementwise((3 * own,), (3 * own,))
            norm = Elementwise((3 * own, 2 * own), (3 * own, 3 * own), self._norm_buffers(column), width)
            return addition if shared else norm, Elementwise(scale, scale)
        stream = Buffer("residual stream", own, kept_under="full" if is_first else "selective")
        # positions for dropout are the microbatch's
        before = (stream, *(self._norm_buffers(column) if placement != "post" else ()))
        after = self._norm_buffers() if placement != "pre" else ()
        second = placement == "both"
        return (
            Elementwise((4 * own,), (4 * own,), before, width),
            Elementwise(
                (2 * own, *scale) if second else scale,
                (3 * own, *scale) if second else scale,
                after,
                width if second else 0,
            ),
        )

    def _norm_buffers(self, column: Matmul | None = None) -> tuple[Buffer, ...]:
        """What a norm and the following product keep: the norm's output, unless that product needs no input,
        and statistics (rstd; for LayerNorm also the mean)."""
        statistics = Buffer(
            "statistics of the norm",
            self.share.own_tokens * (1 if self.model.norm == "rms" else 2),
            "accumulate",
        )
        return (
            (Buffer("output of the norm", self.own), statistics)
            if column is None or column.keeps_input
            else (statistics,)
        )

    def _dropout(self, probability: float) -> list[Buffer]:
        """The positions that are part of a mask's key; the mask itself is recomputed."""
        return (
            [Buffer("positions for dropout", self.share.own_tokens // self.share.batch, "index")]
            if probability
            else []
        )

    @property
    def dropped(self) -> int:
        return self.own if self.model.residual_dropout else 0

    def _probabilities(self, index: int, heads: int) -> tuple[Buffer, ...]:
        """What attention keeps: log-sum-exp, or the reference's probabilities, block by block of queries, of
        the keys that a block sees."""
        by_positions = self.share.cp > 1 and self.share.context != "ulysses"  # never keeps probabilities
        if self.flash or by_positions or self.model.attention_sinks:
            return (Buffer("log-sum-exp", self.share.tokens * heads, "accumulate"),)
        if self.model.attention_softcap is not None:
            return ()
        sequence = self.share.row
        window, seen = self.model.window(index) or sequence, 0
        for first in range(0, sequence, ATTENTION_BLOCK):
            stop = min(first + ATTENTION_BLOCK, sequence)
            seen += (stop - first) * (stop - max(first - window + 1, 0))
        return (
            Buffer("probabilities", self.share.batch * heads * seen // self.share.cp, "accumulate", "none"),
        )
