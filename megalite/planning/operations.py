"""What one microbatch takes on each unit of the model (embedding, layer, head) on one rank: its kernels, one after the other. Seconds.

The lists follow `megalite.model` and `megalite.parallel.tensor`, with the memory traffic that docs/kernels.md states. `Software` says in
what other training codes differ, so that their published speeds can be predicted too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megalite.config.schema import ModelConfig
from megalite.model.parameters import padded_vocabulary
from megalite.planning.hardware import Device
from megalite.planning.kernels import ELEMENTWISE_BYTES, attention, product, stream
from megalite.planning.links import Fabric, group

LOSS_CHUNK = 4096  # tokens whose logits exist at a time on a GPU, `megalite.model.stage`
ACCUMULATED = 8.0  # bytes: an fp32 accumulator is read and written
FORWARD_OPERATIONS, BACKWARD_OPERATIONS = 12, 20  # of a layer, as the host sees them


@dataclass(frozen=True)
class Software:
    """How a training code differs from this one.

    Attributes:
        flash: attention never writes its scores; otherwise every score goes to memory, several times.
        attention: speed of its attention in that of ours.
        masks: dropout writes its masks.
        fused_loss: the loss reads 16-bit logits once each way; otherwise it works on fp32 logits in several passes.
        fp32_accumulation: weight gradients are added to fp32 accumulators.
        hides_tensor: the input gradient's reduction runs beside the weight gradient's product.
        hides_gradients: data parallelism runs beside the backward pass.
        hides_messages: stages send and receive beside computation.
        splits_messages: ranks of tensor parallelism send a part each, and gather it behind.
        elementwise: memory traffic of norms, activations and residual sums in that of fused kernels.
        adam_bytes: traffic of the optimizer for each parameter that a rank updates.
    """

    flash: bool = True
    attention: float = 1.0
    masks: bool = False
    fused_loss: bool = True
    fp32_accumulation: bool = True
    hides_tensor: bool = True
    hides_gradients: bool = True
    hides_messages: bool = True
    splits_messages: bool = False
    elementwise: float = 1.0
    adam_bytes: float = 34.0  # 30, and the gradients once more for their norm


OURS = Software()


class Passes(NamedTuple):
    """One microbatch on one unit or stage: forward, gradient of the input, gradient of the weights; of these, the tensor-parallel
    communication of forward and backward that nothing hides."""

    forward: float
    backward: float
    weight: float
    forward_wait: float = 0.0
    backward_wait: float = 0.0

    def plus(self, other: Passes) -> Passes:
        return Passes(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> Passes:
        return Passes(*(count * value for value in self))

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Shape:
    """One rank's share of one microbatch."""

    micro_batch_size: int
    sequence: int
    tp: int
    sequence_parallel: bool

    @property
    def rows(self) -> int:
        """Tokens of the microbatch."""
        return self.micro_batch_size * self.sequence

    @property
    def own_rows(self) -> float:
        """Tokens between tensor-parallel regions."""
        return self.rows / (self.tp if self.sequence_parallel else 1)


class Operations:
    """The units of a model on a device."""

    def __init__(self, device: Device, model: ModelConfig, precision: str, software: Software = OURS):
        self.device, self.model, self.precision, self.software = device, model, precision, software
        self.size = ELEMENTWISE_BYTES[precision]
        self.fabric = Fabric(device)
        self.tensor = Fabric(device if device.tensor is None else replace(device, within=device.tensor))
        self._layers: dict[tuple[Shape, int | None], Passes] = {}

    def _gemm(self, m: float, n: float, k: float, batch: float = 1) -> float:
        return product(self.device, m, n, k, self.precision, batch)

    def _weight_gradient(self, n: float, k: float, rows: float) -> float:
        return product(self.device, n, k, rows, self.precision, written=ACCUMULATED if self.software.fp32_accumulation else None)

    def _move(self, *values: float) -> float:
        """Kernels that move so many values each."""
        return sum(stream(self.device, value * self.size) for value in values)

    def _pointwise(self, *values: float) -> float:
        """The same of norms, activations and residual sums, as the software has written them."""
        return self._move(*(value * self.software.elementwise for value in values))

    def layer(self, shape: Shape, window: int | None) -> Passes:
        """A transformer layer."""
        key = shape, window
        if key not in self._layers:
            passes = self._attention_block(shape, window).plus(self._feed_forward(shape))
            host = (FORWARD_OPERATIONS * self.device.host_time, BACKWARD_OPERATIONS * self.device.host_time)
            idle = max(0.0, host[1] - passes.backward - passes.weight)
            forward = max(passes.forward, host[0])
            self._layers[key] = passes._replace(forward=forward, backward=passes.backward + idle)
        return self._layers[key]

    # --- blocks ------------------------------------------------------------------------------------------------------------

    def _attention_block(self, shape: Shape, window: int | None) -> Passes:
        model, rows, hidden = self.model, shape.rows, self.model.hidden_size
        heads, kv_heads = model.num_attention_heads / shape.tp, max(model.kv_heads / shape.tp, 1)
        query, packed = heads * model.head_size, (heads + 2 * kv_heads) * model.head_size
        forward, backward = self._attention(heads, shape, window)
        rotary = self._pointwise(2 * rows * packed)
        if model.qk_norm != "none":
            rotary += self._pointwise(2 * rows * packed)
        return Passes(
            forward=self._gemm(rows, packed, hidden) + rotary + forward + self._gemm(rows, hidden, query),
            backward=self._gemm(rows, query, hidden) + backward + rotary + self._gemm(rows, hidden, packed),
            weight=self._weight_gradient(hidden, query, rows) + self._weight_gradient(packed, hidden, rows),
        ).plus(self._around(shape, packed))

    def _feed_forward(self, shape: Shape) -> Passes:
        model, rows, hidden = self.model, shape.rows, self.model.hidden_size
        inner = model.intermediate_size / shape.tp
        wide, act, act_backward = (2 * inner, 3, 6) if model.gated_mlp else (inner, 2, 4)
        return Passes(
            forward=self._gemm(rows, wide, hidden) + self._pointwise(act * rows * inner) + self._gemm(rows, hidden, inner),
            backward=self._gemm(rows, inner, hidden) + self._pointwise(act_backward * rows * inner) + self._gemm(rows, hidden, wide),
            weight=self._weight_gradient(hidden, inner, rows) + self._weight_gradient(wide, hidden, rows),
        ).plus(self._around(shape, wide))

    def _around(self, shape: Shape, column: float) -> Passes:
        """What surrounds a block: norms, residual sum, dropout, and tensor-parallel communication. column: outputs of its first product."""
        values, model = shape.own_rows * self.model.hidden_size, self.model
        norms = 2 if model.norm_placement == "both" else 1
        forward = self._pointwise(4 * values) + (norms - 1) * self._pointwise(2 * values)
        backward = self._pointwise(4 * values) + (norms - 1) * self._pointwise(3 * values)
        if model.residual_dropout:
            mask = (0.5 if self.software.masks else 0.0) * values
            forward, backward = forward + self._move(values + mask), backward + self._move(2 * values + mask)
        forward_wait, backward_wait = self._tensor_parallel(shape, column)
        return Passes(forward + forward_wait, backward + backward_wait, 0.0, forward_wait, backward_wait)

    def _tensor_parallel(self, shape: Shape, column: float) -> tuple[float, float]:
        """Communication of one block that nothing hides, forward and backward (Shoeybi et al. 2019; Korthikanti et al. 2022)."""
        if shape.tp == 1:
            return 0.0, 0.0
        ranks = group(self.device, shape.tp, 1)
        hidden, size = self.model.hidden_size, shape.rows * self.model.hidden_size * self.size
        hides = self.software.hides_tensor and not self.device.cpu
        beside = self._weight_gradient(column, hidden, shape.rows) if hides else 0.0
        if not shape.sequence_parallel:
            reduce = self.tensor.all_reduce(size, ranks)
            return reduce, max(0.0, reduce - beside)
        half = self.tensor.half(size, ranks)
        again = max(0.0, half - (self._gemm(shape.rows, hidden, column) if hides else 0.0))  # the input, gathered again for its product
        return 2 * half, half + again + max(0.0, half - beside)

    def _attention(self, heads: float, shape: Shape, window: int | None) -> tuple[float, float]:
        if not self.software.flash:
            return self._written_scores(heads, shape)
        times = attention(self.device, heads, self.model.head_size, shape.sequence, shape.micro_batch_size, window, self.precision)
        return times[0] / self.software.attention, times[1] / self.software.attention

    def attention_again(self, shape: Shape, window: int | None) -> float:
        """What `selective` recomputes: attention's forward, which kernels that never write their scores compute again in any case."""
        again = not self.software.flash or self.device.cpu
        return self._attention(self.model.num_attention_heads / shape.tp, shape, window)[0] if again else 0.0

    def _written_scores(self, heads: float, shape: Shape) -> tuple[float, float]:
        """Attention whose scores lie in memory: two batched products, softmax and dropout, the mask's half not skipped."""
        sequence, width, batch = shape.sequence, self.model.head_size, heads * shape.micro_batch_size
        scores = batch * sequence**2
        dropped = bool(self.model.attention_dropout)
        mask = (0.5 if self.software.masks else 0.0) * scores
        query_key, by_value = self._gemm(sequence, sequence, width, batch), self._gemm(sequence, width, sequence, batch)
        forward = query_key + self._move(2 * scores, *([2 * scores + mask] if dropped else [])) + by_value
        backward = query_key + 3 * by_value + self._move(3 * scores, *([2 * scores + mask] if dropped else []))
        return forward, backward

    # --- the ends ----------------------------------------------------------------------------------------------------------

    def embedding(self, shape: Shape) -> Passes:
        """Rows looked up, summed over tp; backward adds them to fp32 accumulators."""
        values = shape.rows * self.model.hidden_size
        ranks = group(self.device, shape.tp, 1)
        reduce = self.tensor.half if shape.sequence_parallel else self.tensor.all_reduce
        wait = reduce(values * self.size, ranks)
        gather = self.tensor.half(values * self.size, ranks) if shape.sequence_parallel else 0.0
        added = stream(self.device, values * (self.size + ACCUMULATED))
        return Passes(self._move(2 * values) + wait, gather, added, wait, gather)

    def head(self, shape: Shape, splits: bool) -> Passes:
        """Final norm, logits and loss. In chunks, gradients come with the loss; a schedule that splits the backward has no chunks."""
        model, rows, hidden = self.model, shape.rows, self.model.hidden_size
        vocabulary = padded_vocabulary(model.vocabulary, shape.tp) / shape.tp
        chunked = self.software.fused_loss and not splits and not self.device.cpu
        chunk = min(LOSS_CHUNK, rows) if chunked else rows
        parts, values = rows / chunk, shape.own_rows * hidden
        logits = chunk * vocabulary
        reads = (1, 2) if self.software.fused_loss else (10, 6)  # of 16-bit logits, forward and backward
        memory = self.device if self.device.loss is None else replace(self.device, bandwidth=self.device.loss)
        loss = tuple(stream(memory, times * logits * self.size) for times in reads)
        ranks = group(self.device, shape.tp, 1)
        statistics = self.tensor.half(16 * chunk * shape.tp, ranks)
        gather = (self.tensor.half if shape.sequence_parallel else self.tensor.all_reduce)(chunk * hidden * self.size, ranks)
        before = gather if shape.sequence_parallel else 0.0
        forward = parts * (self._gemm(chunk, vocabulary, hidden) + loss[0] + before + statistics) + self._pointwise(2 * values)
        backward = parts * (self._gemm(chunk, hidden, vocabulary) + loss[1] + gather) + self._pointwise(3 * values)
        weight = parts * self._weight_gradient(vocabulary, hidden, chunk)
        waits = parts * (before + statistics), parts * gather
        if chunked:
            return Passes(forward + backward + weight, 0.0, 0.0, sum(waits))
        return Passes(forward, backward, weight, *waits)
