"""The time of one microbatch on each unit of the model (embedding, layer, head) on one rank, in seconds: the
sum of its kernels.

Each step of a unit's description (`megalite.model.cost`) is a kernel, with the memory traffic that
docs/kernels.md states. `Software` describes how other training codes differ, so that their published speeds
can be predicted too.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.model.cost.records import (
    AttentionCost,
    BlockCost,
    DetachedMatmul,
    Elementwise,
    EmbeddingLookup,
    LocalMatmul,
    Matmul,
    RecurrenceCost,
    SelectionCost,
    Share,
    Step,
    WholeRowsMatmul,
)
from megalite.model.cost.units import LOSS_CHUNK_ON_GPU, Units
from megalite.model.kinds import dispatches_of
from megalite.parallel.fp8_choice import ACTIVATION_BYTES, NO_FP8, Fp8Choice, Fp8Options
from megalite.planner.cost import context_exchange, expert_exchange
from megalite.planner.cost.fp8_times import RECIPES, Fp8Times
from megalite.planner.hardware.devices import Device
from megalite.planner.hardware.kernels import DROPOUT, ELEMENTWISE_BYTES, attention, matmul, stream
from megalite.planner.hardware.links import Fabric, group

ACCUMULATED = 8.0  # bytes: an fp32 accumulator is read and written
FORWARD_OPERATIONS, BACKWARD_OPERATIONS = 40, 80  # that the host launches per layer, an estimate: about 1 ms


@dataclass(frozen=True)
class Software:
    """Differences between a training code and this one.

    Attributes:
        flash: attention never writes its scores; otherwise every score goes to memory, several times.
        attention: speed of its attention relative to ours.
        fp8: recipe in which all matrices of layers multiply (`fp8_times.RECIPES`); none: as the job says.
        masks: dropout writes its masks to memory, and its forward adds to the residual stream in the same
            kernel. Ours does neither.
        loss_bytes: memory traffic of the loss per logit, forward and backward. Ours reads and overwrites
            16-bit logits; PyTorch's casts to fp32 and takes a log-softmax; Megatron-LM's subtracts,
            exponentiates, sums and divides in passes of their own.
        fp32_accumulation: weight gradients are added to fp32 accumulators.
        hides_tensor: the input gradient's reduction overlaps with the weight gradient's matmul.
        async_tensor: forward collectives overlap with their own matmul, part by part.
        hides_gradients: data-parallel communication overlaps with the backward pass.
        hides_messages: sends and receives between stages overlap with computation.
        splits_messages: each tensor-parallel rank sends a part, and the receivers all-gather it.
        elementwise: memory traffic of norms, activations and residual sums relative to fused kernels.
        adam_bytes: memory traffic of the optimizer per parameter that a rank updates.
        host: host time of a layer relative to ours.
        optimistic_in_fp16: a step is corrected afterwards also if it changes the loss scale.
    """

    flash: bool = True
    attention: float = 1.0
    fp8: str = "none"
    masks: bool = False
    loss_bytes: tuple[float, float] = (2.0, 4.0)
    fp32_accumulation: bool = True
    hides_tensor: bool = True
    async_tensor: bool = False
    hides_gradients: bool = True
    hides_messages: bool = True
    splits_messages: bool = False
    elementwise: float = 1.0
    adam_bytes: float = 34.0  # 30, and 4 to read the gradient for its norm
    host: float = 1.0
    optimistic_in_fp16: bool = False


OURS = Software()


class PassTimes(NamedTuple):
    """Seconds of one microbatch on one unit or stage: forward, gradient of the input, gradient of the
    weights; the waits are the exposed communication of tensor, context and expert parallelism contained in
    forward and backward."""

    forward: float
    backward: float
    weight: float
    forward_wait: float = 0.0
    backward_wait: float = 0.0

    def plus(self, other: PassTimes) -> PassTimes:
        return PassTimes(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> PassTimes:
        return PassTimes(*(count * value for value in self))

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


class Operations:
    """Computes the time of each unit of a model on a device. With adapters, other weights are frozen.

    Attributes:
        scores_sequences: whether the loss is an objective over sequences, which computes the logits twice.
    """

    def __init__(
        self,
        device: Device,
        model: ModelConfig,
        precision: str,
        software: Software = OURS,
        lora: LoraConfig | None = None,
        rows: context_exchange.Rows = context_exchange.WHOLE,
        fp8: Fp8Options = NO_FP8,
    ):
        self.device, self.model, self.precision, self.software = device, model, precision, software
        self.lora, self.rows, self.fp8 = lora, rows, fp8
        recipe = software.fp8 if fp8.recipe == "none" else fp8.recipe
        self.fp8_times = None if recipe == "none" else Fp8Times(device, recipe, precision)
        self.scores_sequences = False
        self.size = ELEMENTWISE_BYTES[precision]
        self.fabric = Fabric(device)
        self.tensor = Fabric(device if device.tensor is None else replace(device, within=device.tensor))
        self._units: dict[Share, Units] = {}
        self._layers: dict[tuple[Share, Hashable], PassTimes] = {}
        self._again: dict[tuple[Share, Hashable, str], tuple[float, float]] = {}

    def _gemm(self, m: float, n: float, k: float, batch: float = 1) -> float:
        return matmul(self.device, m, n, k, self.precision, batch)

    def _weight_gradient(self, n: float, k: float, rows: float) -> float:
        return matmul(
            self.device,
            n,
            k,
            rows,
            self.precision,
            written=ACCUMULATED if self.software.fp32_accumulation else None,
        )

    def _move(self, *values: float) -> float:
        """Return the time of kernels that move the given numbers of values."""
        return sum(stream(self.device, value * self.size) for value in values)

    def _pointwise(self, *values: float) -> float:
        """Return the time of norms, activations and residual sums, with the software's memory traffic."""
        return self._move(*(value * self.software.elementwise for value in values))

    def units(self, share: Share) -> Units:
        """Return the descriptions of the model's units under a share."""
        if share not in self._units:
            self._units[share] = Units(self.model, share, self.lora, fp8=self.fp8)
        return self._units[share]

    def layer(self, share: Share, index: int) -> PassTimes:
        """Return the time of a transformer layer."""
        units = self.units(share)
        key = share, units.alike(index)
        if key not in self._layers:
            passes = functools.reduce(
                PassTimes.plus, [self._block(share, block) for block in units.layer(index).blocks]
            )
            for forward_wait, backward_wait in (self.exchange(share, index), self.dispatch(share, index)):
                passes = passes.plus(PassTimes(forward_wait, backward_wait, 0.0, forward_wait, backward_wait))
            operation = self.device.host_time * self.software.host
            host = (FORWARD_OPERATIONS * operation, BACKWARD_OPERATIONS * operation)
            idle = max(0.0, host[1] - passes.backward - passes.weight)
            forward = max(passes.forward, host[0])
            self._layers[key] = passes._replace(forward=forward, backward=passes.backward + idle)
        return self._layers[key]

    # --- blocks
    # --------------------------------------------------------------------------------------------------------

    def _block(self, share: Share, block: BlockCost) -> PassTimes:
        steps = [self._step(self._with_recipe(step)) for step in block.steps]
        last = steps[::-1]  # backward runs from the last step to the first
        passes = PassTimes(
            sum(step.forward for step in steps),
            sum(step.backward for step in last),
            sum(step.weight for step in last),
        )
        return passes.plus(self._around(share, block))

    def _with_recipe(self, step: Step) -> Step:
        """Return a step of a layer in the software's recipe for fp8, if it has one."""
        if self.software.fp8 == "none" or not isinstance(step, Matmul):
            return step
        if isinstance(step, LocalMatmul) and step.at_least_fp32:
            return step
        gradients = RECIPES[self.software.fp8].weight_gradient
        return replace(step, fp8=Fp8Choice(step.local_weights // step.inputs, None, True, True, gradients))

    def _step(self, step: Step) -> PassTimes:
        """Return the time of one step, without its tensor-parallel communication."""
        match step:
            case DetachedMatmul():
                return self._local_matmul(step)._replace(backward=0.0)
            case LocalMatmul():
                return self._local_matmul(step)
            case WholeRowsMatmul():
                once = self._product(step)
                return once._replace(backward=once.forward + once.backward)
            case Matmul():
                return self._product(step)
            case AttentionCost():
                return PassTimes(*self._attention(step), 0.0)
            case SelectionCost():
                return PassTimes(self._selection(step), 0.0, 0.0)
            case RecurrenceCost():
                return self._recurrence(step)
            case Elementwise():
                return PassTimes(self._pointwise(*step.forward), self._pointwise(*step.backward), 0.0)
            case EmbeddingLookup(values=values):  # backward accumulates in fp32
                weight = 0.0 if step.frozen else stream(self.device, values * (self.size + ACCUMULATED))
                return PassTimes(self._move(2 * values), 0.0, weight)

    def _product(self, step: Matmul) -> PassTimes:
        once = self._passes(step, step.rows, 1, self.precision)
        return once.plus(self._adapters(step)).plus(self._adapter_dropout(step))

    def _local_matmul(self, step: LocalMatmul) -> PassTimes:
        """Return the time of equally loaded experts' matmuls, or of a router's in fp32."""
        precision = "fp32" if step.at_least_fp32 and "fp32" in self.device.peaks else self.precision
        once = self._passes(step, step.rows / step.matrices, step.matrices, precision)
        return once.plus(self._adapters(step))

    def _passes(self, step: Matmul, rows: float, batch: int, precision: str) -> PassTimes:
        """Return the time of `batch` matmuls of `rows` tokens each, without adapters."""
        outputs, inputs, fp8, chosen = step.outputs, step.inputs, self.fp8_times, step.fp8
        forward = matmul(self.device, rows, outputs, inputs, precision, batch)
        backward = matmul(self.device, rows, inputs, outputs, precision, batch)
        written = ACCUMULATED if self.software.fp32_accumulation else None
        if fp8 is not None and chosen.rows:
            part = chosen.rows / batch  # of the outputs
            rest = 0.0
            if part < outputs:  # the others in the run's precision, and a copy beside them
                rest = matmul(self.device, rows, outputs - part, inputs, precision, batch)
                rest += self._move(2 * batch * rows * outputs)
            forward = fp8.quantize(batch * rows * inputs) + fp8.time(rows, part, inputs, batch) + rest
            if chosen.input_gradient or not chosen.forward:
                backward = fp8.quantize(batch * rows * part) + fp8.time(rows, inputs, part, batch) + rest
                backward += fp8.transpose(batch * part * inputs)
        if step.frozen:
            return PassTimes(forward, backward, 0.0)
        if fp8 is not None and chosen.weight_gradient:
            weight = fp8.weight_operands(batch * rows * inputs, batch * rows * outputs)
            weight += fp8.time(outputs, inputs, rows, batch, written)
        else:
            weight = matmul(self.device, outputs, inputs, rows, precision, batch, written)
        return PassTimes(forward, backward, weight)

    def _adapters(self, step: Matmul) -> PassTimes:
        """Return the time of the two matmuls of adapters.

        With trained row lengths (DoRA) the rows of the whole weight are included.
        """
        rows, rank, outputs, inputs = step.rows, step.adapter_rank, step.outputs, step.inputs
        if not rank:
            return PassTimes(0.0, 0.0, 0.0)
        forward = (
            self._gemm(rows, rank, inputs) + self._gemm(rows, outputs, rank) + self._move(rows * outputs)
        )
        backward = (
            self._gemm(rows, rank, outputs) + self._gemm(rows, inputs, rank) + self._move(3 * rows * inputs)
        )
        weight = self._weight_gradient(outputs, rank, rows) + self._weight_gradient(rank, inputs, rows)
        if step.adapter_outputs:
            lengths = self._gemm(outputs, inputs, rank) + self._move(2 * step.local_weights)
            forward, backward = (
                forward + lengths + self._move(2 * rows * outputs),
                backward + self._move(3 * rows * outputs),
            )
        return PassTimes(forward, backward, weight)

    def _adapter_dropout(self, step: Matmul) -> PassTimes:
        """Return the time of dropout on an adapter's input.

        It runs in forward, for the input's gradient, and again for the weight gradient. Experts have
        none.
        """
        if not step.adapter_rank or self.lora is None or not self.lora.dropout:
            return PassTimes(0.0, 0.0, 0.0)
        once = self._move(DROPOUT * step.rows * step.inputs)
        return PassTimes(once, once, once)

    def _around(self, share: Share, block: BlockCost) -> PassTimes:
        """Return the time around a block: norms, residual sum, dropout and communication over tp."""
        forward = self._pointwise(*block.before.forward, *block.after.forward)
        backward = self._pointwise(*block.before.backward, *block.after.backward)
        if values := block.dropped:
            dropped = (
                (1.5 * values, 2.5 * values) if self.software.masks else (DROPOUT * values, DROPOUT * values)
            )
            forward, backward = forward + self._move(dropped[0]), backward + self._move(dropped[1])
        columns = [
            each for each in block.matmuls if each.split == "outputs" and not isinstance(each, LocalMatmul)
        ]
        row = next((each for each in block.matmuls[::-1] if each.split == "inputs"), None)
        waits = [self._tensor_parallel(share, column, row) for column in columns]
        forward_wait, backward_wait = (sum(times) for times in zip((0.0, 0.0), *waits, strict=True))
        return PassTimes(forward + forward_wait, backward + backward_wait, 0.0, forward_wait, backward_wait)

    def _tensor_parallel(self, share: Share, column: Matmul, row: Matmul | None) -> tuple[float, float]:
        """Return the exposed communication of a column-parallel and the following row-parallel matmul.

        Forward and backward; see Shoeybi et al. 2019 and Korthikanti et al. 2022.
        """
        if share.tp == 1:
            return 0.0, 0.0
        ranks = group(self.device, share.tp, 1)
        if isinstance(column, WholeRowsMatmul):
            latents = column.communicated * self.size
            half = self.tensor.half(latents, ranks)
            return (
                (half, 2 * half) if share.sequence_parallel else (0.0, self.tensor.all_reduce(latents, ranks))
            )
        size = column.rows * column.inputs * self.size
        hides = self.software.hides_tensor and not self.device.cpu
        beside = (
            self._weight_gradient(column.outputs, column.inputs, column.rows)
            if hides and not column.frozen
            else 0.0
        )
        if not share.sequence_parallel:
            reduce = self.tensor.all_reduce(size, ranks)
            return reduce, max(0.0, reduce - beside)
        half = self.tensor.half(size, ranks)  # of a reduce-scatter

        def gather(codes: int) -> float:
            return self.tensor.half(size * ACTIVATION_BYTES / self.size, ranks) if codes else half

        into = gather(column.gathered_codes.forward)
        back = gather(row.gathered_codes.backward if row else 0)
        matmul = self._gemm(column.rows, column.inputs, column.outputs) if hides else 0.0
        # the input is gathered again for the weight gradient
        again = max(0.0, gather(column.gathered_codes.backward) - matmul) if column.keeps_input else 0.0
        if not self.software.async_tensor:
            return into + half, back + again + max(0.0, half - beside)
        # a rank's own part needs no transfer
        hidden = (share.tp - 1) / share.tp * self._gemm(column.rows, column.outputs, column.inputs)
        into, out, back = (max(0.0, each - hidden) for each in (into, half, back))
        return into + out, back + again + max(0.0, half - beside)

    def exchange(self, share: Share, index: int) -> tuple[float, float]:
        """Return the exposed communication of a layer's blocks over cp, forward and backward."""
        waits = [(0.0, 0.0)]
        for block in self.units(share).layer(index).blocks:
            steps = [(0.0, 0.0), *map(self._attention, block.attentions)]
            forward, backward = (sum(seconds) for seconds in zip(*steps, strict=True))
            waits.append(
                context_exchange.exposed(self.fabric, share, block, (forward, backward), self.size, self.rows)
            )
        forward, backward = (sum(seconds) for seconds in zip(*waits, strict=True))
        return forward, backward

    def dispatch(self, share: Share, index: int) -> tuple[float, float]:
        """Return the exposed communication of a layer's blocks over ep, forward and backward."""
        waits = [(0.0, 0.0)]
        if share.ep > 1:
            waits += [
                expert_exchange.exposed(self.fabric, dispatch, share, self.size)
                for dispatch in dispatches_of(self.model, index)
            ]
        forward, backward = (sum(seconds) for seconds in zip(*waits, strict=True))
        return forward, backward

    def _attention(self, step: AttentionCost) -> tuple[float, float]:
        if not self.software.flash:
            return self._written_scores(step)
        times = attention(
            self.device,
            step.heads / step.cp,
            step.head_size,
            step.sequence,
            step.batch,
            step.window,
            self.precision,
        )
        return times[0] / self.software.attention, times[1] / self.software.attention

    def _selection(self, step: SelectionCost) -> float:
        """Return the time of an indexer's scores, of the choice among them, and of its loss."""
        queries = step.batch * step.sequence / step.ranks
        seen, seconds = step.sequence / 2, 0.0
        if step.selects:
            seconds += self._gemm(queries * step.heads, seen, step.size)
            seconds += stream(self.device, 3 * 8 * queries * seen)  # packed scores, written and read twice
        if step.trained:
            seconds += 3 * self._gemm(queries * step.heads, min(step.top, seen), step.size)
        return seconds

    def _recurrence(self, step: RecurrenceCost) -> PassTimes:
        """Return the time of a recurrence: batches of small matmuls, and the memory around them."""
        sizes = step.chunk, step.value_size, step.key_size
        each = 2 * prod(sizes)
        forward = self._gemm(*sizes, step.flops / each) + self._pointwise(*step.forward)
        backward = self._gemm(*sizes, step.backward_flops / each) + self._pointwise(*step.backward)
        return PassTimes(forward, backward, 0.0)

    def attention_again(self, share: Share, index: int) -> float:
        """Return the seconds of attention's forward, which `selective` recomputes in a layer.

        0 for kernels that never write their scores: their backward always recomputes them.
        """
        if self.software.flash and not self.device.cpu:
            return 0.0
        return sum(self._attention(step)[0] for step in self.units(share).layer(index).attentions)

    def forward(self, step: Step) -> float:
        """Return the kernel time of a step's forward."""
        return self._step(step).forward

    def again(self, share: Share, index: int, mode: str) -> tuple[float, float]:
        """Return the kernel time and exposed communication that a layer's backward recomputes.

        Args:
            mode: as train.recompute.
        """
        if mode in ("none", "full"):
            forward, wait = self.layer(share, index).forward, self.layer(share, index).forward_wait
            return (forward - wait, wait) if mode == "full" else (0.0, 0.0)
        if mode == "selective":
            return self.attention_again(share, index), 0.0
        from megalite.planner.cost.recomputed_time import seconds

        key = share, self.units(share).alike(index), mode
        if key not in self._again:
            self._again[key] = seconds(self, share, index, mode)
        return self._again[key]

    def _written_scores(self, step: AttentionCost) -> tuple[float, float]:
        """Return the time of attention that writes its scores to memory.

        These are two batched matmuls, softmax and dropout; the masked half is computed too.
        """
        sequence, width, batch = step.sequence, step.head_size, step.heads * step.batch / step.cp
        scores = batch * sequence**2
        mask = (0.5 if self.software.masks else 0.0) * scores
        query_key, by_value = (
            self._gemm(sequence, sequence, width, batch),
            self._gemm(sequence, width, sequence, batch),
        )
        dropped = [2 * scores + mask] if step.dropped else []
        forward = query_key + self._move(2 * scores, *dropped) + by_value
        backward = query_key + 3 * by_value + self._move(3 * scores, *dropped)
        return forward, backward

    # --- embedding and head
    # ------------------------------------------------------------------------------------------------

    def embedding(self, share: Share) -> PassTimes:
        """Return the time of the embedding.

        Rows are looked up and summed over tp; backward adds their gradients to fp32 accumulators.
        """
        (block,) = self.units(share).embedding().blocks
        passes = functools.reduce(PassTimes.plus, map(self._step, block.steps))
        ranks, size = group(self.device, share.tp, 1), share.tokens * self.model.hidden_size * self.size
        wait = (self.tensor.half if share.sequence_parallel else self.tensor.all_reduce)(size, ranks)
        gather = self.tensor.half(size, ranks) if share.sequence_parallel else 0.0
        return passes.plus(PassTimes(wait, gather, 0.0, wait, gather))

    def head(self, share: Share, splits: bool) -> PassTimes:
        """Return the time of the final norm, logits and loss.

        Further losses are included without their layers. An objective over log-probabilities computes the
        logits twice; a reward model has none.
        """
        if self.model.output_head == "reward":
            (block,) = self.units(share).head().blocks
            return self._block(share, block)
        logits, further = self._logits(share, splits), self.units(share).further_losses()
        if self.scores_sequences:
            scores = self.scores(share)
            logits = logits._replace(forward=logits.forward + scores)
        if not further:
            return logits
        (block,) = further[0].joining.blocks
        module = self.embedding(share).plus(self._block(share, block))
        return logits.plus(module.plus(logits).times(len(further)))

    def scores(self, share: Share) -> float:
        """Return the time of the logits and their log-probabilities, without gradients."""
        once = self._logits(share, splits=True)
        (block,) = self.units(share).head().blocks
        return once.forward - self._step(block.before).forward

    def _logits(self, share: Share, splits: bool) -> PassTimes:
        """Return the time of the final norm, the logits and the loss.

        With loss chunks, the forward also computes the gradients; a split backward does not use chunks.
        """
        (block,) = self.units(share).head().blocks
        (logits,) = block.matmuls
        chunked = self.software.loss_bytes == OURS.loss_bytes and not splits and not self.device.cpu
        chunk = min(LOSS_CHUNK_ON_GPU, logits.rows) if chunked else logits.rows
        parts = logits.rows / chunk
        matmul = self._step(replace(logits, rows=chunk))
        memory = self.device if self.device.loss is None else replace(self.device, bandwidth=self.device.loss)
        loss = tuple(
            stream(memory, size * chunk * logits.outputs * self.size / 2) for size in self.software.loss_bytes
        )
        ranks = group(self.device, share.tp, 1)
        statistics = self.tensor.half(16 * chunk * share.tp, ranks)
        gather = (self.tensor.half if share.sequence_parallel else self.tensor.all_reduce)(
            chunk * logits.inputs * self.size, ranks
        )
        before = gather if share.sequence_parallel else 0.0
        norm = self._step(block.before)
        forward = parts * (matmul.forward + loss[0] + before + statistics) + norm.forward
        backward = parts * (matmul.backward + loss[1] + gather) + norm.backward
        weight = parts * matmul.weight
        waits = parts * (before + statistics), parts * gather
        if chunked:
            return PassTimes(forward + backward + weight, 0.0, 0.0, sum(waits))
        return PassTimes(forward, backward, weight, *waits)
