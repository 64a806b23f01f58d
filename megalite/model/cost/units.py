"""The description of each unit of the model, for one tensor-parallel rank and one microbatch.

The steps are those of `megalite.model` and `megalite.parallel.tensor`; each tensor that their autograd
functions save is a Buffer, each storage counted once. Shapes of weights are those of the stored parameters
(`megalite.model.parameters`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import takewhile

from megalite.config.sections.lora import PROJECTIONS, LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.mesh.layout import Coordinates
from megalite.model.block_kind import BlockSpec
from megalite.model.cost.records import (
    BlockCost,
    Buffer,
    Elementwise,
    EmbeddingLookup,
    FurtherLoss,
    LocalMatmul,
    Matmul,
    Share,
    Step,
    UnitCost,
)
from megalite.model.kinds import KINDS, blocks_of
from megalite.model.mtp.cost import further_losses
from megalite.model.parameters import layer_specs
from megalite.model.spec_builder import padded_vocabulary
from megalite.model.unit_numbers import head_unit
from megalite.parallel.fp8_choice import NO_FP8, Fp8Options, fp8_choice

LOSS_CHUNK_ON_GPU = 4096
"""Tokens whose logits exist at a time on a GPU, unless train.loss_chunk says otherwise: adding a chunk to the
fp32 weight gradient then takes 1/20 of the time of the chunk's matmuls."""


class Units:
    """Describes the units of a model.

    Args:
        share: the part of the model and of a batch.
        lora: adapters; with a rank all other weights are frozen.
        flash: attention runs a kernel that keeps one number per query and head instead of probabilities.
        fp8: the options of matmuls in fp8.
    """

    def __init__(
        self,
        model: ModelConfig,
        share: Share,
        lora: LoraConfig | None = None,
        flash: bool = True,
        fp8: Fp8Options = NO_FP8,
    ):
        self.model, self.share, self.lora, self.flash = model, share, lora or LoraConfig(), flash
        self.fp8 = fp8
        self.own = share.own_tokens * model.hidden_size  # elements of [sequence (/tp), batch, hidden]
        self.whole = share.tokens * model.hidden_size  # elements of [sequence, batch, hidden]
        self._layers: dict[Hashable, UnitCost] = {}
        self._keys: dict[int, Hashable] = {}  # by layer

    def unit(self, number: int) -> UnitCost:
        """Return unit `number`: 0 is the embedding, 1 … L are the layers, and L + 1 is the head.

        Further losses of the head are not included.
        """
        if number == 0:
            return self.embedding()
        return self.head() if number == head_unit(self.model) else self.layer(number - 1)

    def alike(self, index: int) -> Hashable:
        """Return a key that layers with the same description share."""
        if index not in self._keys:
            blocks = blocks_of(self.model, index)
            kinds = ((each.kind, each.beside, KINDS[each.kind].alike(self.model, index)) for each in blocks)
            self._keys[index] = (*kinds, self.fp8.in_unit(index + 1, self.model.num_hidden_layers))
        return self._keys[index]

    def layer(self, index: int) -> UnitCost:
        """Return the description of a transformer layer (0-based)."""
        key = self.alike(index)
        if key not in self._layers:
            matmuls, blocks = self._layer_matmuls(index), blocks_of(self.model, index)
            own = [KINDS[block.kind].cost(self, block, matmuls) for block in blocks]
            if self.fp8.in_unit(index + 1, self.model.num_hidden_layers):
                own = self._with_experts_in_fp8(index, own)
            costs = list[BlockCost]()
            for number, (block, cost) in enumerate(zip(blocks, own, strict=True)):
                # the blocks after it that have no norm of their own read the output of its norm, too
                after_it = takewhile(lambda each: each.beside and not each.input_norm, blocks[number + 1 :])
                readers = own[number : number + 1 + len(list(after_it))]
                keeps_input = any(each.keeps_input for each in readers)
                before, after = self._around(block, not number, keeps_input)
                costs.append(replace(cost, before=before, after=after, dropped=self._dropped))
            self._layers[key] = UnitCost(tuple(costs))
        return self._layers[key]

    def embedding(self) -> UnitCost:
        """Return the description of the vocabulary table, of learned positions and of a norm.

        It keeps the token ids, and a mask of those with rows on other ranks.
        """
        model, share = self.model, self.share
        table = self._vocabulary * model.hidden_size
        positions = model.position == "learned"
        kept = [
            Buffer("tokens", share.tokens, "index"),
            *([Buffer("tokens of other ranks", share.tokens, "mask")] if share.tp > 1 else []),
        ]
        kept += [Buffer("positions", share.sequence, "index")] if positions else []
        kept += self._dropout(model.embedding_dropout)
        weights = table + (model.hidden_size * model.max_position_embeddings if positions else 0)
        lookup = EmbeddingLookup(
            share.tokens, model.hidden_size, weights, self._frozen("embedding"), tuple(kept)
        )
        if not model.embedding_norm:
            return UnitCost((BlockCost((lookup,)),))
        # the first layer keeps its output
        normed = (Buffer("output of the embedding", self.own), *self._norm_buffers(keeps_output=False))
        return UnitCost((BlockCost((lookup, Elementwise((2 * self.own,), (3 * self.own,), normed))),))

    def head(self) -> UnitCost:
        """Return the description of the final norm and the logits, or the rewards of tokens.

        What the loss keeps depends on how it is computed and is not included.
        """
        model = self.model
        if model.output_head == "reward":
            return self._reward_head()
        name = "embedding" if model.tied_head else "head"
        weights = model.vocabulary * model.hidden_size
        matmul = Matmul(
            name,
            self.share.tokens,
            self._vocabulary,
            model.hidden_size,
            weights,
            "outputs",
            self._frozen(name),
        )
        scale = () if model.logit_factor is None else (2 * self.own,)
        kept = (Buffer("residual stream", self.own), *self._norm_buffers(matmul.keeps_input))
        norm = Elementwise((2 * self.own, *scale), (3 * self.own, *scale), kept)
        workspace = (Buffer("gradients of the norm", 2 * self.whole),)
        return UnitCost((BlockCost((matmul,), workspace, before=norm),))

    def _reward_head(self) -> UnitCost:
        own, width = self.share.own_tokens, self.model.hidden_size
        ranks = self.share.tokens // own
        matmul = LocalMatmul("score", own, 1, width, width, "outputs", ranks=ranks)
        stream, weights = Buffer("residual stream", self.own), Buffer("derivatives by rewards", own)
        norm = Elementwise((2 * self.own,), (3 * self.own,), (stream, *self._norm_buffers(), weights))
        workspace = (Buffer("gradients of the norm", 2 * self.own),)
        return UnitCost((BlockCost((matmul,), workspace, before=norm),))

    def further_losses(self) -> list[FurtherLoss]:
        """Return the description of the head's further losses in training."""
        return further_losses(self)

    def _frozen(self, module: str) -> bool:
        return self.lora.rank > 0 and module not in (self.lora.modules_to_save or ())

    @property
    def _vocabulary(self) -> int:
        """Return the rows of the padded vocabulary on this rank."""
        return padded_vocabulary(self.model.vocabulary, self.share.tp) // self.share.tp

    # --- a layer
    # --------------------------------------------------------------------------------------------------------

    def _layer_matmuls(self, index: int) -> dict[str, Matmul]:
        """Return the matmuls of all tokens with the weights of a layer, by name."""
        lora, tp, matmuls = self.lora, self.share.tp, {}
        prefix = f"layers.{index}."
        for spec in layer_specs(self.model, index, tp):
            segments = [segment for segment in spec.segments if segment.role in PROJECTIONS]
            if not segments:
                continue
            name = spec.name.removeprefix(prefix).removesuffix(".weight")
            at = Coordinates.on("tp", 0, tp)
            outputs, inputs = spec.local_shape(at)
            adapted = [segment for segment in segments if lora.adapts(segment.role)]
            matmul = Matmul(
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
                fp8=fp8_choice(spec, at, self.fp8, self.model.num_hidden_layers),
                splits_sequence=self.share.sequence_parallel and tp > 1,
            )
            matmuls[name] = matmul if segments[0].split is not None else self._of_own_tokens(matmul)
        return matmuls

    def _with_experts_in_fp8(self, index: int, blocks: Sequence[BlockCost]) -> list[BlockCost]:
        """Return the blocks of a layer with what of the experts' matmuls is in fp8."""
        layers, at = self.model.num_hidden_layers, Coordinates.on("expert", 0, self.share.ep)
        choices = {
            spec.name.removeprefix(f"layers.{index}.").removesuffix(".weight"): fp8_choice(
                spec, at, self.fp8, layers
            )
            for spec in layer_specs(self.model, index, self.share.tp)
            if spec.domain == "expert"
        }

        def chosen(steps: Sequence[Step]) -> tuple[Step, ...]:
            return tuple(
                replace(step, fp8=choices[step.name])
                if isinstance(step, LocalMatmul) and step.name in choices
                else step
                for step in steps
            )

        return [replace(block, steps=chosen(block.steps), output=chosen(block.output)) for block in blocks]

    def _of_own_tokens(self, matmul: Matmul) -> LocalMatmul:
        """Return the matmul of each rank's own tokens with a whole matrix."""
        own = self.share.own_tokens
        return LocalMatmul(**{**vars(matmul), "rows": own, "ranks": self.share.tokens // own})

    def _around(self, block: BlockSpec, is_first: bool, keeps_input: bool) -> tuple[Elementwise, Elementwise]:
        """Return the residual sum with its fused norm, and the norm of the output.

        Args:
            is_first: whether the block's input is the layer's input.
            keeps_input: whether the block's backward needs its input.
        """
        model, own = self.model, self.own
        width = model.hidden_size * (2 if model.norm == "layer" and model.norm_bias else 1)
        factors = KINDS[block.kind].output_factors(model, block)
        scale = (2 * own,) * sum(factor != 1.0 for factor in factors)
        if block.beside:  # the layer's input is kept already
            addition = Elementwise((3 * own,), (3 * own,))
            norm = Elementwise((3 * own, 2 * own), (3 * own, 3 * own), self._norm_buffers(keeps_input), width)
            return addition if block.input_norm is None else norm, Elementwise(scale, scale)
        stream = Buffer("residual stream", own, kept_under="full" if is_first else "selective")
        # positions for dropout are the microbatch's
        before = (stream, *(self._norm_buffers(keeps_input) if block.input_norm is not None else ()))
        after = self._norm_buffers() if block.output_norm else ()
        second = block.output_norm and block.input_norm is not None
        return (
            Elementwise((4 * own,), (4 * own,), before, width),
            Elementwise(
                (2 * own, *scale) if second else scale,
                (3 * own, *scale) if second else scale,
                after,
                width if second else 0,
            ),
        )

    def _norm_buffers(self, keeps_output: bool = True) -> tuple[Buffer, ...]:
        """Return what a norm and the following matmul keep.

        These are the norm's output, if that is kept, and statistics (rstd; for LayerNorm also the mean).
        """
        values = self.share.own_tokens * (1 if self.model.norm == "rms" else 2)
        statistics = Buffer("statistics of the norm", values, "accumulate")
        return (Buffer("output of the norm", self.own), statistics) if keeps_output else (statistics,)

    def _dropout(self, probability: float) -> list[Buffer]:
        """The positions that are part of a mask's key; the mask itself is recomputed."""
        return (
            [Buffer("positions for dropout", self.share.own_tokens // self.share.batch, "index")]
            if probability
            else []
        )

    @property
    def _dropped(self) -> int:
        return self.own if self.model.residual_dropout else 0
