"""The records that describe a unit: what one tensor-parallel rank computes and keeps for one microbatch.

UnitCost             embedding, layer or head
  BlockCost          of each block of a layer
    Matmul           matmul with a stored weight           EmbeddingLookup  rows of a stored table
    AttentionCost    matmuls of queries, keys and values   Elementwise      memory-bound kernels
    RecurrenceCost   chunks of a recurrence with a state
      Buffer         a tensor that forward keeps for backward
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from megalite.config.dims import attention_method, equal_part
from megalite.config.recompute import operations_of
from megalite.parallel.fp8_choice import ACTIVATION_BYTES, Fp8Choice

Dtype = Literal["compute", "accumulate", "index", "row", "mask", "code"]
"""compute: train.precision; accumulate: at least fp32; index: of a token or a position; row: of a selected
row, four bytes; mask: one byte; code: bytes of fp8 codes and their scales."""
Mode = Literal["none", "selective", "full"]
"""train.recompute of a layer: a stronger mode keeps less and recomputes more."""
MODES: tuple[str, ...] = ("none", "selective", "full")


class TokenSplit(Protocol):
    """Options that split tokens over ranks: `ParallelConfig` or the planner's `LayoutChoice`."""

    @property
    def tp(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def cp(self) -> int: ...
    @property
    def context(self) -> str: ...
    @property
    def context_inner(self) -> int: ...
    @property
    def context_parts(self) -> str: ...
    @property
    def ep(self) -> int: ...
    @property
    def expert_dispatch(self) -> str: ...


@dataclass(frozen=True)
class Share:
    """One tensor- and context-parallel rank's share of one microbatch.

    The defaults are the whole model and one sequence.

    Attributes:
        sequence: positions of a row that a context-parallel rank holds.
        context: how attention exchanges the parts of a row, with more than one cp rank.
        context_inner: neighbouring cp ranks that exchange heads; the others are a ring.
        dispatch: how rows reach their experts, with more than one ep rank.
        parts: which parts of a row the cp ranks hold.
        by_bytes: whether blocks with a state choose how they communicate over cp by the bytes that they send;
            otherwise they exchange heads if attention does.
    """

    sequence: int
    batch: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    context: str = "ulysses"
    ep: int = 1
    context_inner: int = 1
    dispatch: str = "all_to_all"
    parts: str = "zigzag"
    by_bytes: bool = False

    @classmethod
    def of(cls, split: TokenSplit, sequence_length: int, micro_batch_size: int) -> Share:
        """Return the share of each rank when rows of `sequence_length` tokens are split by the options."""
        ranks = split.tp if split.sequence_parallel else 1
        return cls(
            sequence=equal_part(sequence_length, split.cp, split.context, ranks, split.context_parts),
            batch=micro_batch_size,
            tp=split.tp,
            sequence_parallel=split.sequence_parallel,
            cp=split.cp,
            context=attention_method(split.context),
            ep=split.ep,
            context_inner=split.context_inner,
            dispatch=split.expert_dispatch,
            parts=split.context_parts,
            by_bytes=split.context == "auto",
        )

    @property
    def row(self) -> int:
        """Return the number of positions of a row, over all cp ranks."""
        return self.sequence * self.cp

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the microbatch on one context-parallel rank."""
        return self.batch * self.sequence

    @property
    def own_tokens(self) -> int:
        """Return the number of tokens on one rank between tensor-parallel regions."""
        return self.tokens // (self.tp if self.sequence_parallel else 1)


class Buffer(NamedTuple):
    """A tensor that forward keeps for backward, or a temporary of the backward.

    Attributes:
        values: number of elements on this rank.
        kept_under: the strongest mode that keeps it; stronger modes recompute it.
    """

    name: str
    values: int
    dtype: Dtype = "compute"
    kept_under: Mode = "selective"


def size_in_bytes(buffers: Iterable[Buffer], widths: Mapping[Dtype, int], mode: str = "none") -> int:
    """Return the bytes of the buffers kept under a recomputation mode, given the bytes of each dtype."""
    strength = MODES.index(mode)
    return sum(
        buffer.values * widths[buffer.dtype]
        for buffer in buffers
        if MODES.index(buffer.kept_under) >= strength
    )


class Kernels(NamedTuple):
    """Options of a run that choose kernels.

    Attributes:
        kernels: `train.kernels`.
        documents: whether rows hold several documents.
        deterministic: `run.deterministic`.
    """

    kernels: str
    documents: bool
    deterministic: bool


@dataclass(frozen=True)
class Dispatch:
    """What a block sends over the ranks of `parallel.ep`: each token's row to some of its experts, and back.

    Attributes:
        experts: number of experts, which the ranks share equally.
        choices: experts that process a token.
        width: elements of a row.
        kept: elements that an expert keeps of a row until its backward.
        operation: the operation of `train.recompute` that repeats the forward.
        capacity_factor: the most rows of an expert and sequence, relative to equal load; None: no limit.
    """

    experts: int
    choices: int
    width: int
    kept: int
    operation: str
    capacity_factor: float | None = None

    def repeated(self, mode: str) -> bool:
        """Return whether the backward of a layer with this mode of `train.recompute` dispatches again."""
        return mode == "full" or self.operation in operations_of(mode)


class ContextExchange(NamedTuple):
    """Number of values that a block exchanges over cp; a rank sends (ranks − 1) / ranks of them.

    Attributes:
        method: how they are exchanged: ulysses, gather, ring, or states.
        ranks: the ranks of this level of cp.
        forward: at the compute dtype, again wherever the forward is recomputed.
        backward: at the compute dtype.
        summed: gradients, in at least fp32, in backward.
        states: states, in at least fp32, in forward.
        merged: values of a partial result, which each hop of a ring merges with those before it.
    """

    method: str = ""
    ranks: int = 1
    forward: int = 0
    backward: int = 0
    summed: int = 0
    merged: int = 0
    states: int = 0

    def size_in_bytes(self, width: int, wide: int) -> int:
        """Return the bytes in forward and backward, of elements at the compute dtype and in at least fp32."""
        return (self.forward + self.backward) * width + (self.states + self.summed) * wide


class Collectives(NamedTuple):
    """Number of times that a ring passes a tensor around the tp ranks, once for an all-gather or
    reduce-scatter, twice for an all-reduce."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Matmul:
    """A matmul of tokens with a stored weight [outputs, inputs].

    Attributes:
        name: the stored weight's name within its unit: attention.qkv, attention.out, mlp.in, mlp.down, head.
        rows: tokens that are multiplied with it.
        outputs, inputs: this rank's part, padding and replicated key-value heads included.
        weights: elements of the whole weight, each counted once.
        split: the dimension that is split over tp ranks.
        frozen: the weight has no gradient (LoRA).
        adapter_rank: outputs of the adapters' first factors A, which are stored together; 0 without adapters.
        adapter_weights: elements of both factors of the adapters, over all tp ranks.
        adapter_outputs: outputs that adapters keep, on this rank: with trained row lengths (DoRA) all of
            them.
        fp8: what of it multiplies in fp8.
        splits_sequence: sequence parallelism.
    """

    name: str
    rows: int
    outputs: int
    inputs: int
    weights: int
    split: Literal["outputs", "inputs"]
    frozen: bool = False
    adapter_rank: int = 0
    adapter_weights: int = 0
    adapter_outputs: int = 0
    fp8: Fp8Choice = Fp8Choice(0)
    splits_sequence: bool = False

    @property
    def local_weights(self) -> int:
        """Return the number of elements on this rank."""
        return self.outputs * self.inputs

    def local_adapter_weights(self, tp: int) -> float:
        """Elements of the adapters on this rank: one factor is split like the matmul, the other is
        replicated."""
        first = self.adapter_rank * self.inputs
        second = self.adapter_weights - first * (1 if self.split == "outputs" else tp)
        return first + second / (tp if self.split == "outputs" else 1) + self.adapter_outputs

    @property
    def flops(self) -> int:
        """Return the FLOPs of the forward, over all tp ranks."""
        return 2 * self.rows * (self.weights + self.adapter_weights)

    @property
    def training_flops(self) -> int:
        """FLOPs of forward and backward over all tp ranks: gradients of the input, and of weights that are
        trained."""
        return 2 * self.rows * ((2 if self.frozen else 3) * self.weights + 3 * self.adapter_weights)

    @property
    def keeps_input(self) -> bool:
        """Return whether the backward needs the input, for gradients of the weight or of its adapters."""
        return not self.frozen or self.adapter_rank > 0

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """Return the adapters' tensors. The input is kept by the step that computed it."""
        return (
            self.between,
            Buffer(f"{self.name}: outputs of the adapters", self.rows * self.adapter_outputs),
            Buffer(f"{self.name}: factors and lengths of rows", 2 * self.adapter_outputs, "accumulate"),
        )

    @property
    def between(self) -> Buffer:
        """Return the adapters' tensors between A and B. They are kept, and are part of what is stashed."""
        return Buffer(f"{self.name}: between the adapters' factors", self.rows * self.adapter_rank)

    @property
    def lengths(self) -> int:
        """Values all-reduced over tp in forward: two squared lengths of each row of a weight whose inputs are
        split (DoRA)."""
        return 2 * self.adapter_outputs if self.split == "inputs" else 0

    @property
    def stashed(self) -> tuple[Buffer, ...]:
        """Return what a split backward keeps until the W pass: input and output gradient, gathered."""
        if not self.keeps_input:
            return ()
        values, codes = self.rows * (self.inputs + self.outputs), 0
        if self.splits_sequence and self.split == "outputs" and self.gathered_codes.backward:
            values, codes = self.rows * self.outputs, round(self.rows * self.inputs * ACTIVATION_BYTES)
        return (
            Buffer(f"{self.name}: input and gradient of the output", values),
            Buffer(f"{self.name}: codes of the input", codes, "code"),
            Buffer(f"{self.name}: the same of the adapters", 2 * self.rows * self.adapter_rank),
        )

    @property
    def communicated(self) -> int:
        """Values of the tensor that `collectives` counts the passes of: the input of split outputs, the
        output of split inputs."""
        return self.rows * (self.inputs if self.split == "outputs" else self.outputs)

    def collectives(self, sequence_parallel: bool) -> Collectives:
        """Split outputs: the input's gradient is summed; under sequence parallelism the input is gathered,
        and again for weight gradients. Split inputs: the output is summed; under sequence parallelism its
        gradient is gathered."""
        if self.split == "outputs":
            return Collectives(1, 2 if self.keeps_input else 1) if sequence_parallel else Collectives(0, 2)
        return Collectives(1, 1) if sequence_parallel else Collectives(2, 0)

    @property
    def gathered_codes(self) -> Collectives:
        """Return the gathers among `collectives` that are of fp8 codes under sequence parallelism: only of
        what neither adapters nor matmuls in the compute dtype read."""
        if self.adapter_rank:
            return Collectives(0, 0)
        if self.split == "outputs":
            return Collectives(self.fp8.forward, self.fp8.weight_gradient and not self.frozen)
        return Collectives(0, self.frozen and self.fp8.input_gradient)

    def sent_over_tp(self, sequence_parallel: bool, width: int) -> tuple[float, float]:
        """Return the bytes that rings pass around tp in forward and in backward.

        Args:
            width: bytes of the compute dtype.
        """
        passes = self.collectives(sequence_parallel)
        codes = self.gathered_codes if sequence_parallel else Collectives(0, 0)
        forward, backward = (
            self.communicated * ((each - coded) * width + coded * ACTIVATION_BYTES)
            for each, coded in zip(passes, codes, strict=True)
        )
        return forward, backward


@dataclass(frozen=True)
class LocalMatmul(Matmul):
    """A matmul of each rank's own tokens with whole matrices: a router, or equally loaded experts.

    Attributes:
        rows: rows of this rank: tokens, or for experts k times as many.
        outputs, inputs: of one matrix; `weights` are its elements, `adapter_weights` those of its adapter.
        ranks: number of tp ranks, each with the same number of rows.
        matrices: number of matrices on this rank, of which each row is multiplied with one.
        experts: they belong to experts, which other ranks share than share dense weights.
        at_least_fp32: in which it is computed, as a router's is.
    """

    ranks: int = 1
    matrices: int = 1
    experts: bool = False
    at_least_fp32: bool = False

    @property
    def local_weights(self) -> int:
        return self.matrices * self.outputs * self.inputs

    def local_adapter_weights(self, tp: int) -> float:
        return self.matrices * self.adapter_weights + self.adapter_outputs

    @property
    def flops(self) -> int:
        return 2 * self.ranks * self.rows * (self.weights + self.adapter_weights)

    @property
    def training_flops(self) -> int:
        return (
            2 * self.ranks * self.rows * ((2 if self.frozen else 3) * self.weights + 3 * self.adapter_weights)
        )

    def collectives(self, sequence_parallel: bool) -> Collectives:
        """None over tp."""
        return Collectives(0, 0)

    @property
    def gathered_codes(self) -> Collectives:
        return Collectives(0, 0)


@dataclass(frozen=True)
class SharedOutputsMatmul(LocalMatmul):
    """A `LocalMatmul` some of whose outputs every tp rank needs for all tokens, such as a shared key.

    Attributes:
        shared: number of these outputs.
    """

    shared: int = 0

    @property
    def communicated(self) -> int:
        return self.ranks * self.rows * self.shared

    def collectives(self, sequence_parallel: bool) -> Collectives:
        """Their gradients are summed; under sequence parallelism they are gathered first."""
        return Collectives(1, 1) if sequence_parallel else Collectives(0, 2)


@dataclass(frozen=True)
class WholeRowsMatmul(Matmul):
    """A matmul of whole rows, whose narrow inputs travel over cp, such as latents: a part of attention.

    The backward repeats it.

    Attributes:
        rows: tokens of whole rows.
        width: values of a token that travel.
        cp: ranks that hold a part of the tokens.
        gathered: sequence parallelism: they are gathered over tp, too.
    """

    width: int = 0
    cp: int = 1
    gathered: bool = False

    @classmethod
    def of(cls, matmul: Matmul, share: Share, width: int) -> WholeRowsMatmul:
        """Return the matmul of a rank; `matmul` is that of its own tokens."""
        fields: dict[str, Any] = {**vars(matmul), "rows": share.tokens * share.cp}
        return cls(**fields, width=width, cp=share.cp, gathered=share.sequence_parallel)

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """Return nothing: the backward starts from latents, which the steps that compute them keep."""
        return ()

    @property
    def own_rows(self) -> int:
        return self.rows // self.cp

    @property
    def communicated(self) -> int:
        return (self.rows if self.gathered else self.own_rows) * self.width

    def collectives(self, sequence_parallel: bool) -> Collectives:
        """Under sequence parallelism latents are gathered, and again for backward; their gradient is summed,
        else that of own tokens."""
        return Collectives(1, 2) if sequence_parallel else Collectives(0, 2)

    @property
    def gathered_codes(self) -> Collectives:
        """None: latents travel in the compute dtype."""
        return Collectives(0, 0)


@dataclass(frozen=True)
class DetachedMatmul(LocalMatmul):
    """A `LocalMatmul` whose input has no gradient, such as those of an indexer.

    Attributes:
        spread: outputs that every tp rank needs for all tokens; without sequence parallelism it has them.
        cp: ranks whose tokens those are.
        input_of: the name of the matmul whose input it reads; empty: that of the block.
    """

    spread: int = 0
    cp: int = 1
    input_of: str = ""

    @property
    def training_flops(self) -> int:
        return (1 if self.frozen else 2) * self.flops

    @property
    def communicated(self) -> int:
        return self.cp * self.ranks * self.rows * self.spread

    def collectives(self, sequence_parallel: bool) -> Collectives:
        """Under sequence parallelism outputs are gathered, and their gradients summed."""
        return Collectives(1, 0 if self.frozen else 1) if sequence_parallel else Collectives(0, 0)


@dataclass(frozen=True)
class EmbeddingLookup:
    """A lookup of one row of a stored table per token.

    Attributes:
        local_weights: elements of the tables on this rank.
    """

    rows: int
    width: int
    local_weights: int
    frozen: bool = False
    kept: tuple[Buffer, ...] = ()

    @property
    def values(self) -> int:
        """Return the number of elements copied."""
        return self.rows * self.width

    @property
    def flops(self) -> int:
        """One operation per element copied."""
        return self.values

    @property
    def communicated(self) -> int:
        """Values of the tensor that `collectives` counts the passes of."""
        return self.values

    def collectives(self, sequence_parallel: bool) -> Collectives:
        """Each rank has a part of the rows, so the output is summed; under sequence parallelism its gradient
        is gathered."""
        return Collectives(1, 0 if self.frozen else 1) if sequence_parallel else Collectives(2, 0)

    def sent_over_tp(self, sequence_parallel: bool, width: int) -> tuple[float, float]:
        """Return the bytes that rings pass around tp in forward and in backward, as `Matmul.sent_over_tp`."""
        forward, backward = self.collectives(sequence_parallel)
        return forward * self.communicated * width, backward * self.communicated * width


def attended_pairs(sequence: int, window: int | None) -> int:
    """Return the number of (query, key) pairs of one head and sequence under a causal mask and a window."""
    seen = min(window or sequence, sequence)
    return seen * (seen + 1) // 2 + (sequence - seen) * seen


@dataclass(frozen=True)
class AttentionCost:
    """Causal attention of this rank's heads: queries with keys, probabilities with values.

    Attributes:
        sequence: positions of a row, over all cp ranks.
        cp: ranks that compute an equal part of the pairs each.
        dropped: whether dropout applies to the probabilities.
        selected: whether the `window` is a number of selected rows.
    """

    batch: int
    sequence: int
    heads: int
    key_size: int
    value_size: int
    window: int | None
    kept: tuple[Buffer, ...] = ()
    cp: int = 1
    dropped: bool = False
    selected: bool = False
    local_weights = 0

    @property
    def head_size(self) -> float:
        """Return the mean of the head sizes of keys and values; each of the two matmuls has one of them."""
        return (self.key_size + self.value_size) / 2

    @property
    def flops(self) -> int:
        """Return the FLOPs of this rank's part, over the pairs that the mask leaves."""
        pairs = self.batch * attended_pairs(self.sequence, self.window) * self.heads
        return 2 * pairs * (self.key_size + self.value_size) // self.cp

    def matmul_flops(self, positions: float) -> float:
        """Return the mean FLOPs of the two matmuls for one token that attends to `positions` positions."""
        return positions * (self.heads * (self.key_size + self.value_size))


@dataclass(frozen=True)
class SelectionCost:
    """Scores of an indexer with all rows that a query sees, of which it selects `top`, and its loss.

    The scores of the selected rows are computed again for the loss, and their gradients at once.

    Attributes:
        sequence: positions of a row, over all cp ranks.
        ranks: ranks of cp and of tp that score an equal part of the queries each.
        trained: whether there is a loss.
        summed: queries of the cp rank whose probabilities of the selected rows are summed over tp.
        split: tp ranks that score different queries: the selections are gathered over them.
    """

    batch: int
    sequence: int
    heads: int
    size: int
    top: int
    kept: tuple[Buffer, ...] = ()
    ranks: int = 1
    trained: bool = False
    summed: int = 0
    split: int = 1
    local_weights = 0

    @property
    def selects(self) -> bool:
        """Return whether any query sees more than `top` rows."""
        return self.sequence > self.top

    @property
    def flops(self) -> int:
        """Return the FLOPs of this rank's part, over the pairs that the mask leaves.

        The loss counts three times: scores, and the gradients of queries and keys.
        """
        pairs = attended_pairs(self.sequence, None) if self.selects else 0
        pairs += 3 * attended_pairs(self.sequence, self.top) if self.trained else 0
        return 2 * self.batch * pairs * self.heads * self.size // self.ranks

    def token_flops(self, visible: float, selected: float) -> float:
        """Return the mean FLOPs of one token with these numbers of visible and of selected rows."""
        pairs = (visible if visible > selected else 0.0) + (3 * selected if self.trained else 0.0)
        return 2 * pairs * self.heads * self.size

    def sent_over_tp(self, sequence_parallel: bool, width: int) -> float:
        """Return the bytes that rings pass around tp in each forward: selections, and probabilities.

        Args:
            width: bytes of at least fp32.
        """
        values = self.summed * self.top
        if not sequence_parallel:
            return 2 * values * width
        tokens = self.batch * self.sequence * self.split // self.ranks
        return values * width + (tokens * self.top * 4 if self.selects else 0)


@dataclass(frozen=True)
class Elementwise:
    """Memory-bound kernels: norms, activations, residual sums.

    Attributes:
        forward, backward: for each kernel, the number of values that it reads and writes.
        local_weights: elements of norms on this rank.
        summed: values all-reduced over tp in forward, and the same number in backward.
    """

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    kept: tuple[Buffer, ...] = ()
    local_weights: int = 0
    summed: int = 0
    flops = 0


@dataclass(frozen=True)
class RecurrenceCost:
    """A recurrence with a state for each head of this rank, in chunks of tokens, or a convolution.

    Attributes:
        flops: FLOPs of the forward, with the chunk of the convention (`CHUNK` of the block's cost). Those of
            convolutions are not counted.
        backward_flops: of the backward, with what it computes again.
        forward, backward: as in `Elementwise`.
        chunk, key_size, value_size: sizes of the matmuls that these FLOPs are spent in.
    """

    flops: int
    backward_flops: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    chunk: int
    key_size: int
    value_size: int
    kept: tuple[Buffer, ...] = ()
    local_weights = 0


Step = Matmul | EmbeddingLookup | AttentionCost | SelectionCost | RecurrenceCost | Elementwise


@dataclass(frozen=True)
class BlockCost:
    """A block of a unit: its steps in the order of the forward.

    Attributes:
        steps: between the norms. The weight gradient of the last matmul is the first that a split backward
            defers.
        workspace: estimate of the largest temporaries of the backward: gradients, gathered inputs.
        exchanges: of its levels of context parallelism, innermost first.
        keeps_input: whether the backward needs the block's input.
        before: the residual sum, and the norm that is fused with it.
        after: the norm of the block's output.
        dropped: number of output values to which dropout applies.
        output: steps before the last matmul that `BlockModule.last` includes.
        keeps_last_input: whether the input of the last matmul is among what the steps keep.
        readers: the matmuls that read the block's input; empty: the first one.
    """

    steps: tuple[Step, ...]
    workspace: tuple[Buffer, ...] = ()
    exchanges: tuple[ContextExchange, ...] = ()
    keeps_input: bool = True
    before: Elementwise = Elementwise()
    after: Elementwise = Elementwise()
    dropped: int = 0
    output: tuple[Step, ...] = ()
    keeps_last_input: bool = False
    readers: tuple[str, ...] = ()

    @property
    def reading(self) -> list[Matmul]:
        """Return the matmuls that read the block's input as it is: not those that round it."""
        first = [each for each in self.matmuls if each.name in self.readers] or self.matmuls[:1]
        return [each for each in first if not (isinstance(each, LocalMatmul) and each.at_least_fp32)]

    @property
    def all_steps(self) -> tuple[Step, ...]:
        return (self.before, *self.steps, self.after)

    @property
    def matmuls(self) -> list[Matmul]:
        return [step for step in self.steps if isinstance(step, Matmul)]

    @property
    def attentions(self) -> list[AttentionCost]:
        return [step for step in self.steps if isinstance(step, AttentionCost)]


@dataclass(frozen=True)
class UnitCost:
    """A unit of the model: embedding, layer or head."""

    blocks: tuple[BlockCost, ...]

    @property
    def steps(self) -> list[Step]:
        return [step for block in self.blocks for step in block.all_steps]

    @property
    def matmuls(self) -> list[Matmul]:
        return [matmul for block in self.blocks for matmul in block.matmuls]

    @property
    def attentions(self) -> list[AttentionCost]:
        return [step for block in self.blocks for step in block.attentions]

    @property
    def selections(self) -> list[SelectionCost]:
        return [step for step in self.steps if isinstance(step, SelectionCost)]

    @property
    def recurrences(self) -> list[RecurrenceCost]:
        return [step for step in self.steps if isinstance(step, RecurrenceCost)]

    @property
    def flops(self) -> int:
        """Return the FLOPs of the forward: matmuls and attended pairs, without norms and activations."""
        return sum(step.flops for step in self.steps)

    @property
    def local_weights(self) -> int:
        """Return the number of elements of matrices, tables and norms on this rank.

        Biases and the norms of queries and keys are not counted.
        """
        return sum(step.local_weights for step in self.steps)

    @property
    def kept(self) -> list[Buffer]:
        """Return the tensors that the forward keeps for the backward."""
        return [buffer for step in self.steps for buffer in step.kept]

    @property
    def summed(self) -> int:
        """Return the values of elementwise kernels all-reduced over tp in forward, and in backward."""
        return sum(step.summed for step in self.steps if isinstance(step, Elementwise))

    @property
    def lengths(self) -> int:
        """Return the values of matmuls that are all-reduced over tp in forward."""
        return sum(matmul.lengths for matmul in self.matmuls)


class FurtherLoss(NamedTuple):
    """A further loss of the head, which a module with a layer computes in training.

    Attributes:
        lookup: of the tokens that the module reads.
        joining: of these with the output of the norm before.
        layer: the module's layer.
        head: the norm and the logits.
    """

    lookup: UnitCost
    joining: UnitCost
    layer: UnitCost
    head: UnitCost
