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
from megalite.config.schema import Config
from megalite.config.sections.lora import LoraConfig
from megalite.config.token_files import is_chat, prefixes
from megalite.model.cost.recomputed import chosen, groups
from megalite.model.cost.records import (
    MODES,
    Buffer,
    Dtype,
    FurtherLoss,
    Kernels,
    Share,
    UnitCost,
    size_in_bytes,
)
from megalite.model.cost.units import LOSS_CHUNK_ON_GPU, Units
from megalite.model.kinds import block_kinds, blocks_of
from megalite.model.mtp.losses import module_layers
from megalite.model.unit_numbers import head_unit
from megalite.parallel.fp8_choice import Fp8Options
from megalite.planner.memory.states import DeviceType, Widths

INDEX = 8  # bytes of a token or a target
ROW = 4  # bytes of the number of a selected row


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of one microbatch on one unit.

    Attributes:
        saved: kept from the forward to the backward.
        recomputed: additional while its own backward runs, which recomputes it. stash: kept from a split
        backward to the weight pass; `stash_first` of it is allocated before anything saved is freed. logits,
        logits_stash: the same as `saved` and `stash`, for the logits and their gradient; `logits_chunk`:
        while the forward runs. workspace: an estimate of the largest temporaries of its backward: gradients
        of activations, gathered inputs.
    """

    saved: int = 0
    recomputed: int = 0
    stash: int = 0
    stash_first: int = 0
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
        if mode in MODES:
            saved = self._size(unit.kept, mode)
            # selective recomputes probabilities one block at a time
            recomputed = self._size(unit.kept) - saved if mode == "full" else 0
        else:
            operations = chosen(groups(self.units, index), mode)
            saved = self._size(unit.kept) - sum(self._size(each.buffers) for each in operations)
            recomputed = sum(self._size(each.restored) for each in operations)
        stash, first = self._stash(index, unit)
        workspace = self.own + max(self._size(block.workspace) for block in unit.blocks)
        return HeldBytes(saved, recomputed, stash, first, workspace=workspace)

    def _stash(self, index: int, unit: UnitCost) -> tuple[int, int]:
        """Return the bytes that a layer's weight pass needs, and the part that is allocated early.

        The early part is allocated before any saved tensor is freed: the stash of the last matmul, except
        tensors that are also saved, and except the tensors that the norm after the matmul frees.
        """
        if not self.splits:
            return 0, 0
        last = unit.blocks[-1]
        stash = sum(self._size(each.stashed) for each in unit.matmuls) - self._stashed_again(index, unit)
        if not last.matmuls:
            return stash, 0
        matmul = last.matmuls[-1]
        first = self._size(matmul.stashed) - self._size((matmul.between,)) - self._size(last.after.kept)
        if last.keeps_last_input and matmul.stashed:
            first -= matmul.rows * matmul.inputs * self.width
        return stash, max(first, 0)

    def _stashed_again(self, index: int, unit: UnitCost) -> int:
        """Return the bytes of tensors that several matmuls of a layer stash, beyond the first time.

        Matmuls may read the same input, and blocks beside each other get the same gradient. Under sequence
        parallelism each gathers tensors of its own.
        """
        if self.share.own_tokens != self.share.tokens:
            return 0
        inputs = outputs = again = 0  # of the matmuls so far that have the input or the gradient in common
        for spec, block in zip(blocks_of(self.model, index), unit.blocks, strict=True):
            if spec.input_norm is not None or not spec.beside:
                inputs = 0
            if not spec.beside:
                outputs = 0
            for matmul in block.reading:
                if matmul.stashed and matmul.rows * matmul.inputs == self.units.own:
                    again += self.own if inputs else 0
                    inputs += 1
            is_gradient_of_stream = not (block.after.forward or block.after.kept or block.dropped)
            for matmul in block.matmuls[-1:] if is_gradient_of_stream else []:
                if matmul.stashed and matmul.rows * matmul.outputs == self.units.own:
                    again += self.own if outputs else 0
                    outputs += 1
        return again

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
        # tanh keeps its output
        one = matmul.outputs * self.width * (1 if self.model.logit_softcap is None else 2)
        if chunk := self.loss_chunk:
            gradient = 0 if matmul.keeps_input else self.own
            return HeldBytes(kept + gradient, logits_chunk=chunk * one, workspace=self.own)
        stash = self.splits and matmul.keeps_input
        return HeldBytes(
            saved=kept + matmul.rows * (2 * self.accumulate + INDEX),
            stash=self.whole if stash else 0,
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

        Parts of further losses count as units. If positions depend on documents,
        each microbatch keeps its own tables.
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
