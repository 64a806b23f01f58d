"""Bytes that each unit of the model keeps per microbatch on one rank, from forward to backward, and on to a
weight pass.

The units' description (`megalite.model.cost`) lists the tensors; this module applies the configuration of a
run: dtypes, kernels, recomputation, and how the loss is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from megalite.assembly.plan import activation_shape
from megalite.config.recompute import operations_of
from megalite.config.schema import Config
from megalite.config.sections.lora import LoraConfig
from megalite.config.token_files import is_chat, prefixes
from megalite.model.cost.recomputed import chosen, groups, recorded_outputs
from megalite.model.cost.records import (
    MODES,
    Buffer,
    Dtype,
    FurtherLoss,
    Kernels,
    Share,
    size_in_bytes,
)
from megalite.model.cost.units import LOSS_CHUNK_ON_GPU, Units
from megalite.model.kinds import block_kinds
from megalite.model.mtp.losses import module_layers
from megalite.model.unit_numbers import head_unit
from megalite.parallel.fp8_choice import Fp8Options
from megalite.planner.memory.stash import StashWalk
from megalite.planner.memory.states import DeviceType, Widths

INDEX = 8  # bytes of a token or a target
ROW = 4  # bytes of the number of a selected row


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one microbatch on one unit.

    Attributes:
        saved: kept from the forward to the backward.
        recomputed: additional while its own backward runs, which recomputes it.
        recorded: additional until its own forward ends, which only then drops what is recomputed by name.
        stash: kept from a split backward to the weight pass.
        stash_peak: the most that its backward has stashed beyond what it has freed, at any time.
        logits, logits_stash: the same as `saved` and `stash`, for the logits and their gradient.
        logits_chunk: the logits of a chunk, while the forward runs.
        workspace: an estimate of the largest temporaries of its backward: gradients of activations, gathered
            inputs.
    """

    saved: int = 0
    recomputed: int = 0
    recorded: int = 0
    stash: int = 0
    stash_peak: int = 0
    logits: int = 0
    logits_stash: int = 0
    logits_chunk: int = 0
    workspace: int = 0


class Activations:
    """Activations of the units of a configuration's model.

    Args:
        splits: whether the backward is split into two passes, so that weight gradients are deferred.
        lora: adapters; by default all parameters are trained.
    """

    def __init__(
        self,
        config: Config,
        device: DeviceType = "cuda",
        splits: bool = False,
        lora: LoraConfig | None = None,
    ):
        model, parallel, train, widths = config.model, config.parallel, config.train, Widths.of(config)
        self.config, self.model, self.device, self.splits = config, model, device, splits
        self.width, self.accumulate = widths.compute, widths.accumulate
        self.widths: dict[Dtype, int] = {
            "compute": widths.compute,
            "accumulate": widths.accumulate,
            "index": INDEX,
            "row": ROW,
            "mask": 1,
            "code": 1,
        }
        # positions depend on documents
        self.documents = config.data.reset_positions or any(map(is_chat, prefixes(config.data.train)))
        self.share = Share.of(parallel, config.data.sequence_length, train.micro_batch_size)
        self.units = Units(model, self.share, lora, self.flash, fp8=Fp8Options.of(train))
        self._layers: dict[tuple[Hashable, str], HeldBytes] = {}
        self.own, self.whole = prod(activation_shape(config)) * self.width, self.units.whole * self.width

    @property
    def message(self) -> int:
        """Return the bytes of a message between two stages."""
        return self.own

    def _size(self, buffers: Iterable[Buffer], mode: str = "none") -> int:
        return size_in_bytes(buffers, self.widths, mode)

    def bytes_of(self, buffers: Iterable[Buffer]) -> int:
        """Return the bytes of tensors that a layer may keep."""
        return self._size(buffers)

    def unit(self, number: int) -> HeldBytes:
        if number == 0:
            return HeldBytes(saved=self._size(self.units.embedding().kept))
        return self.head() if number == head_unit(self.model) else self.layer(number - 1)

    def layer(self, index: int) -> HeldBytes:
        mode = self.config.train.recompute_of(index)
        key = self.units.alike(index), mode
        if key not in self._layers:
            self._layers[key] = self._layer(index, mode)
        return self._layers[key]

    def _layer(self, index: int, mode: str) -> HeldBytes:
        unit = self.units.layer(index)
        recorded = 0
        if mode in MODES:
            saved = self._size(unit.kept, mode)
            # selective recomputes probabilities one block at a time
            recomputed = self._size(unit.kept) - saved if mode == "full" else 0
        else:
            operations = chosen(groups(self.units, index), mode)
            saved = self._size(unit.kept) - sum(self._size(each.buffers) for each in operations)
            recomputed = sum(self._size(each.restored) for each in operations)
            recorded = recomputed + recorded_outputs(self.units, index, mode) * self.own
        workspace = self.own + max(self._size(block.workspace) for block in unit.blocks)
        held = HeldBytes(saved, recomputed, recorded, workspace=workspace)
        if not self.splits:
            return held
        by_block = "scores" in operations_of(mode)  # probabilities never exist at once
        walk = StashWalk(self.units, index, self.widths, "selective" if by_block else "none")
        return replace(held, stash=walk.stash, stash_peak=walk.peak)

    @property
    def flash(self) -> bool:
        """Return whether attention keeps one number per query (the log-sum-exp) instead of probabilities."""
        train = self.config.train
        if self.device == "cpu" or train.precision not in ("bf16", "fp16"):
            return False
        kernels = Kernels(train.kernels, self.documents, self.config.run.deterministic)
        return not any(kind.keeps_scores(self.model, kernels) for kind in block_kinds(self.model))

    @property
    def loss_chunk(self) -> int:
        """Return the tokens whose logits exist at a time; 0 if all exist from forward to backward."""
        tokens, batch = self.share.tokens, self.share.batch
        chunk, ranks = self.config.train.loss_chunk, tokens // self.share.own_tokens
        chunk = (LOSS_CHUNK_ON_GPU if self.device == "cuda" else 0) if chunk is None else chunk
        if not chunk or self.splits:
            return 0
        positions = self.share.sequence // ranks
        return min(max(chunk * positions // tokens, 1), positions) * ranks * batch

    def head(self) -> HeldBytes:
        """Return the bytes of the head.

        These are the final norm's input and output (or the gradient computed with the loss), and the
        logits.
        """
        (block,) = self.units.head().blocks
        (matmul,) = block.matmuls
        kept = self._size(block.before.kept)
        if self.model.output_head == "reward":
            stash = self._size(matmul.stashed) if self.splits else 0
            return HeldBytes(kept, stash=stash, workspace=self._size(block.workspace))
        # tanh keeps its output
        one = matmul.outputs * self.width * (1 if self.model.logit_softcap is None else 2)
        if chunk := self.loss_chunk:
            gradient = 0 if matmul.keeps_input else self.own
            return HeldBytes(kept + gradient, logits_chunk=chunk * one, workspace=self.own)
        stash = self.splits and matmul.keeps_input
        # the loss frees what it has kept before the input, which is kept, too, is gathered over tp
        of_loss = matmul.rows * (2 * self.accumulate + INDEX)
        gathered = self.whole if stash and self.own != self.whole else 0
        return HeldBytes(
            saved=kept + of_loss,
            stash=self.whole if stash else 0,
            stash_peak=max(gathered - of_loss, 0),
            logits=matmul.rows * one,
            logits_stash=matmul.rows * matmul.outputs * self.width if stash else 0,
            workspace=self._size(block.workspace),
        )

    def _joined(self, loss: FurtherLoss) -> HeldBytes:
        """Return the activations of the first part of a further loss.

        If the loss is computed in chunks, which keep a gradient in place of the norm's output, the module
        keeps the output of that norm itself.
        """
        before = self.own if self.loss_chunk else 0
        stash = sum(self._size(each.stashed) for each in loss.joining.matmuls) if self.splits else 0
        return HeldBytes(
            before + self._size((*loss.lookup.kept, *loss.joining.kept)),
            stash=stash,
            workspace=self.own + sum(self._size(block.workspace) for block in loss.joining.blocks),
        )

    def stage(self, numbers: Sequence[int]) -> list[HeldBytes]:
        """Return the bytes of a stage's units, first to last.

        Parts of further losses count as units. If positions depend on documents, each microbatch keeps its
        own tables.
        """
        units = [self.unit(number) for number in numbers]
        if head_unit(self.model) in numbers:
            for index, loss in zip(module_layers(self.model), self.units.further_losses(), strict=True):
                units += [self._joined(loss), self.layer(index), self.head()]
        if self.documents:
            units[0] = replace(units[0], saved=units[0].saved + self.share.batch * self._tables(numbers))
        return units

    def tables(self, numbers: Sequence[int]) -> int:
        """Return the bytes of a stage's tables by position, if they do not depend on documents."""
        return 0 if self.documents else self._tables(numbers)

    def _tables(self, numbers: Sequence[int]) -> int:
        layers = [number - 1 for number in numbers if 0 < number < head_unit(self.model)]
        values = 0
        for kind in block_kinds(self.model):
            own = [layer for layer in layers if kind.name in self.model.block_names(layer)]
            values += kind.table_values(self.model, own, self.share.sequence)
        return values * self.width
