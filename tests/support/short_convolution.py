"""A kind of block that megalite does not have: a gated causal depthwise convolution of width 3 in place of attention.

It is registered through the public table, and has what any kind has: parameters, computation, cost, an operation that
`train.recompute` may name, and what a row keeps in generation. The jobs below are those of other tests, on ranks that
know the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalite.config.layer_blocks import LAYER_BLOCKS
from megalite.config.recompute import OPERATIONS
from megalite.config.sections.lora import PROJECTIONS
from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockKind, BlockSpec
from megalite.model.block_module import BlockModule, Operation
from megalite.model.cost import recomputed
from megalite.model.cost.records import BlockCost, Buffer, Elementwise, Matmul
from megalite.model.cost.units import Units
from megalite.model.forward_state import ForwardState
from megalite.model.kinds import KINDS, register
from megalite.model.layer_options import LayerOptions
from megalite.model.row_cache import CachedBlock, CachedState
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.weight import Weight
from tests.commands.jobs import continued
from tests.support import jobs, jobs_memory, jobs_training

WIDTH = 3
KIND = "short_convolution"


def shifted(x: Tensor, by: int, first: Tensor | None) -> Tensor:
    """x of `by` positions earlier, [seq, batch, channels]; zero before the first position of a document.

    first: [seq, batch] index of the first token of each token's document; None: of the row.
    """
    if not by:
        return x
    earlier = torch.cat([torch.zeros_like(x[:by]), x[:-by]])
    return earlier if first is None else earlier * reaches(first, by)


def reaches(first: Tensor, by: int) -> Tensor:
    """Whether the position `by` earlier is in a token's document, [seq, batch, 1]."""
    positions = torch.arange(len(first), device=first.device).unsqueeze(1)
    return (positions - by >= first).unsqueeze(-1)


def convolved(value: Tensor, weight: Tensor, first: Tensor | None) -> Tensor:
    return sum((shifted(value, WIDTH - 1 - tap, first) * weight[:, tap] for tap in range(WIDTH)), torch.zeros(()))


class _GatedConvolution(torch.autograd.Function):
    """gate · convolution(value): [seq, batch, 2 · channels/tp] -> [seq, batch, channels/tp]. No communication."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, weight: Weight, first: Tensor | None) -> Tensor:
        ctx.weight, ctx.first = weight, first
        ctx.save_for_backward(packed)
        gate, value = packed.chunk(2, -1)
        return gate * convolved(value, weight.tensor, first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (packed,), weight, first = ctx.saved_tensors, ctx.weight, ctx.first
        (gate, value), taps = packed.chunk(2, -1), weight.tensor
        grad = grads[0] * gate  # of the convolution's output
        if weight.trainable:
            earlier = [shifted(value, WIDTH - 1 - tap, first) for tap in range(WIDTH)]
            weight.accumulate(torch.stack([(grad * each).sum((0, 1)) for each in earlier], dim=1))
        dvalue = grad * taps[:, -1]
        for by in range(1, WIDTH):
            part = grad * taps[:, WIDTH - 1 - by]
            part = part if first is None else part * reaches(first, by)
            dvalue = dvalue + torch.cat([part[by:], torch.zeros_like(part[:by])])
        return torch.cat([grads[0] * convolved(value, taps, first), dvalue], -1), None, None


class ShortConvolution(BlockModule):
    """out(gate · convolution(value)), [seq (/tp), batch, hidden] -> the same shape; each tp rank has its channels."""

    def __init__(self, block: BlockSpec, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions):
        super().__init__()
        split = options.sequence_parallel
        self.into = ColumnParallelLinear(weights[f"{block.name}.in.weight"], None, mesh.tp, split)
        self.out = RowParallelLinear(weights[f"{block.name}.out.weight"], None, mesh.tp, split)
        self.weight = weights[f"{block.name}.convolution.weight"]  # [channels/tp, WIDTH]

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        mixed = self.call(self.mix, self.into(x), state.document_start)
        out: Tensor = self.call(self.out, mixed)
        return out

    def mix(self, packed: Tensor, first: Tensor | None) -> Tensor:
        out: Tensor = _GatedConvolution.apply(packed, self.weight, first)
        return out

    def operations(self) -> Mapping[str, Operation]:
        return {"convolution": self.mix}

    @property
    def last(self) -> Operation:
        return self.out


class Values:
    """The last values of each row, [WIDTH − 1, rows, channels/tp]."""

    def __init__(self, values: Tensor):
        self.values, self.nbytes = values, values.nbytes


class CachedConvolution(CachedBlock):
    def __init__(self, block: ShortConvolution):
        super().__init__()
        self.block = block

    def new_store(self, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> Values:
        return Values(torch.zeros(WIDTH - 1, rows, len(self.block.weight.tensor), dtype=dtype, device=device))

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        if not isinstance(state, CachedState):
            return self.block(x, state)
        cache, store = state.cache, state.cache.stores[self]
        packed = self.block.into(x)
        gate, value = packed.chunk(2, -1)
        before = store.values.clone() if cache.continues else torch.zeros_like(store.values)
        store.values.copy_(cache.last_of(value, before, state.part))
        windows = torch.cat([before, value]).unfold(0, WIDTH, 1)  # [seq, rows, channels, WIDTH]
        return self.block.out(gate * (windows * self.block.weight.tensor).sum(-1))


class ShortConvolutionKind(BlockKind):
    name, slot = KIND, "attention"
    joins_output = True
    operations = {"convolution": "gate · convolution"}
    projections = ("conv_gate", "conv_value", "conv_out")

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        hidden = build.model.hidden_size
        parts = [("conv_gate", hidden, 1), ("conv_value", hidden, 1)]
        taps = Segment(f"{block.name}.convolution.weight", (hidden, WIDTH), 0, decay=False, init_std=0.5)
        into = build.column(f"{block.name}.in", parts, bias=False)
        return into + one_each(build.unit, taps) + build.row(f"{block.name}.out", "conv_out", hidden, bias=False)

    def make(
        self, model: ModelConfig, block: BlockSpec, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
    ) -> ShortConvolution:
        return ShortConvolution(block, weights, mesh, options)

    def cost(self, units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
        into, out, tokens = matmuls[f"{block.slot}.in"], matmuls[f"{block.slot}.out"], units.share.tokens
        packed = Buffer("gate and value", tokens * into.outputs)
        mixed = Buffer("output of the convolution", tokens * out.inputs)
        values = tokens * out.inputs
        mix = Elementwise((3 * values,), (5 * values,), (packed, mixed))
        workspace = (Buffer("gradients of the convolution", 6 * values),)
        return BlockCost((into, mix, out), workspace, keeps_input=into.keeps_input, keeps_last_input=out.keeps_input)

    def recomputed(self, units: Units, cost: BlockCost) -> list[recomputed.Group]:
        _, mix, _ = cost.steps
        output = recomputed.named(mix.kept, "output of the convolution")
        return [(recomputed.Operation(("convolution",), output, (mix,)),)]

    def cached(self, block: BlockModule) -> BlockModule:
        assert isinstance(block, ShortConvolution)
        return CachedConvolution(block)


@contextmanager
def registered(*kinds: BlockKind) -> Iterator[None]:
    """The table has further kinds inside the block, for tests in pytest's own process."""
    tables = (KINDS, LAYER_BLOCKS, OPERATIONS, PROJECTIONS)
    before = [table.copy() for table in tables]  # type: ignore[attr-defined]
    for kind in kinds:
        register(kind)
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()  # type: ignore[attr-defined]
        table.extend(content) if isinstance(table, list) else table.update(content)  # type: ignore[attr-defined]


def _known(job: Callable[..., Any]) -> Callable[..., Any]:
    """The job on a rank that knows the kind."""

    def run(*args: Any) -> Any:
        register(ShortConvolutionKind())
        return job(*args)

    run.__qualname__ = run.__name__ = job.__name__
    return run


train, most_kept = _known(jobs.train), _known(jobs_memory.most_kept)
train_and_save, resume = _known(jobs_training.train_and_save), _known(jobs_training.resume)
continued = _known(continued)
