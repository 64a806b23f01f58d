"""Single parts on the pool's ranks, compared with plain torch: loss, gradient norm, weight decay, stages, matmuls."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megalite.assembly.parts import build_parts
from megalite.config.load import from_dict
from megalite.launch import matmul_library
from megalite.mesh.mesh import Layout, Mesh
from megalite.model.parameters import model_specs
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch, StageOutput
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.runtime import Runtime
from megalite.parallel.pipeline.send_recv_actions import edges, with_communication
from megalite.parallel.spec import Segment
from megalite.parallel.tensor.cross_entropy import CrossEntropy
from megalite.training.matmul_choice import choose
from tests.optimizer.norms import total_norm
from tests.support.jobs import make_trainer, mesh_of

PADDING = 1e3  # a value in padding that any leak would show


def plain_mesh(context: Any, **axes: int) -> Mesh:
    mesh: Mesh = context.cached(("plain", *axes.items()), lambda: Mesh(Layout(**axes)))
    return mesh


def rows_read(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Where this rank is, and the samples of its first microbatches."""
    trainer = make_trainer(context, config)
    rows = [microbatch.samples.tolist() for microbatch in trainer.loader.step(0)]
    trainer.close()
    return {"dp": trainer.mesh.dp.rank, "cp": trainer.mesh.cp.rank, "rows": rows}


def cross_entropy(
    context: Any, logits: Tensor, targets: Tensor, smoothing: float, z_loss: float, padded: int
) -> tuple[float, Tensor]:
    """The loss and this rank's part of its gradient. logits [tokens, vocabulary] are whole; padded columns get a large
    value."""
    mesh = plain_mesh(context, tp=context.world)
    whole = F.pad(logits, (0, padded - logits.shape[1]), value=50.0)
    own = whole.chunk(context.world, dim=1)[context.rank].clone().requires_grad_()
    loss = CrossEntropy(mesh.tp, logits.shape[1], smoothing, z_loss)(own * 1.0, targets, 0.125)
    loss.backward()
    assert own.grad is not None
    return loss.item(), own.grad


def gradient_norm(context: Any, config: dict[str, Any], gradients: dict[str, Tensor]) -> float:
    """The norm of given global gradients, held as the layout holds them; everything that must not count is
    `PADDING`, but the gaps between tensors, which are zero."""
    parsed = from_dict(config)
    mesh = mesh_of(context, parsed)
    store = build_parts(parsed, mesh, "cpu").store

    def part_of(segment: Segment) -> Tensor:
        part = segment.local(mesh.coordinates)
        values = torch.full(part.shape, PADDING, dtype=torch.float64)
        whole = gradients[segment.name][
            tuple(slice(low, low + size) for low, size in zip(part.offsets, part.sizes, strict=True))
        ]
        values[tuple(slice(0, size) for size in part.sizes)] = whole
        return values.to(torch.promote_types(store.buckets[0].master.dtype, torch.float32))

    for memory in store.buckets:
        assert memory.gradients is not None and memory.gradients.full is not None
        memory.gradients.full.fill_(PADDING)
    for weight in store.weights.values():
        assert weight.grad is not None
        weight.grad.copy_(torch.cat([part_of(segment) for segment in weight.spec.segments]))
    for memory in store.buckets:  # what other dp ranks own has not been reduced here
        assert memory.gradients is not None and memory.gradients.full is not None
        memory.gradients.full[: memory.start], memory.gradients.full[memory.stop :] = PADDING, PADDING
        for start, stop in memory.layout.gaps:
            memory.gradients.full[start:stop] = 0
    return total_norm(store, mesh)[0].item()


def random_gradients(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Global gradients by segment name, fp64."""
    generator = torch.Generator().manual_seed(seed)
    segments = [segment for spec in model_specs(from_dict(config).model) for segment in spec.segments]
    return {segment.name: torch.randn(segment.shape, generator=generator, dtype=torch.float64) for segment in segments}


def step_without_gradient(context: Any, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after an optimizer step whose gradients are zero: what weight decay alone does."""
    from megalite.training.verify import global_tensors

    trainer = make_trainer(context, config)
    trainer.close()
    before = global_tensors(trainer)
    for memory in trainer.store.buckets:
        memory.owned_grads.zero_()
    trainer.optimizer.step(1, 0.25, None)
    return before, global_tensors(trainer)


def token_losses(context: Any, config: dict[str, Any], validation: bool) -> tuple[list[float], list[int], float]:
    """For each microbatch of this dp rank, from plain logits: summed loss and number of tokens; and the loss that the
    trainer reports."""
    trainer = make_trainer(context, config)
    try:
        (stage,) = trainer.parts.stages.values()
        if validation:
            assert trainer.validation_data is not None
            loader = trainer.loader_of(trainer.validation_data, trainer.validation_data.samples_per_epoch)
            microbatches = [each for batch in loader.epoch() for each in batch]
            loader.close()
        else:
            microbatches = trainer.loader.step(0)
        sums, counts = [], []
        for each in microbatches:
            with torch.no_grad():
                logits = stage.logits(each.tokens, stage.forward_state(each, 1, training=False)).flatten(0, 1)
            vocabulary = trainer.config.model.vocabulary
            targets = each.targets.reshape(-1)
            sums.append(
                F.cross_entropy(logits[:, :vocabulary], targets, ignore_index=IGNORE_INDEX, reduction="sum").item()
            )
            counts.append(int((each.targets != IGNORE_INDEX).sum()))
        return sums, counts, trainer.evaluate() if validation else trainer.step().loss
    finally:
        trainer.close()


def matmul_setting(context: Any, config: dict[str, Any], seconds: list[dict[str, float]]) -> str:
    """This rank's float32 matmul precision after all ranks have chosen; rank r measures the times seconds[r]."""
    parsed = from_dict(config)
    before = torch.get_float32_matmul_precision()
    try:
        with patch.object(matmul_library, "measure", lambda *_: seconds[context.rank]):
            choose(parsed, mesh_of(context, parsed), torch.device("cpu"))
        return torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)


# ---- a pipeline of stages that only count live outputs


class _Double(torch.autograd.Function):
    """Saves nothing; its output's memory tells when it is freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: CountingStage) -> Tensor:
        buffer = np.empty(x.shape, dtype=np.float32)
        ctx.stage, ctx.buffer = stage, weakref.ref(buffer)
        stage.outputs.append(ctx.buffer)  # the tensor's memory is the array's: it dies with the last tensor on it
        return torch.from_numpy(buffer).copy_(x * 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.stage.freed_in_backward.append(ctx.buffer() is None)
        ctx.stage.alive_in_backward.append(ctx.stage.alive())
        return grads[0] * 2, None


class CountingStage:
    """Doubles its input; the last stage sums. Knows how many of its outputs' buffers live."""

    def __init__(self, rank: int, last: bool):
        self.rank, self.last = rank, last
        self.outputs: list[weakref.ref[Any]] = []
        self.alive_in_backward: list[int] = []
        self.freed_in_backward: list[bool] = []
        self.received: list[float] = []
        self.parameter = torch.ones((), requires_grad=True)

    def forward_state(self, microbatch: Microbatch, step: int, training: bool) -> None:
        return None

    def __call__(self, x: Tensor, microbatch: Microbatch, state: None, loss_scale: float) -> StageOutput:
        self.received.append(x.flatten()[0].item())
        if self.last:
            loss = x.sum() * loss_scale
            return StageOutput(loss, {"loss": loss.detach()})
        x = x.float() * self.parameter if self.rank == 0 else x
        return StageOutput(_Double.apply(x, self))

    def alive(self) -> int:
        return sum(buffer() is not None for buffer in self.outputs)


def hand_over(context: Any, schedule: str, microbatches: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """Run the schedule over one counting stage a rank: what arrived, how many outputs lived, the first stage's
    gradient."""
    plan = with_communication(build(schedule, context.world, microbatches))
    mesh = context.cached(("pipeline", schedule), lambda: Mesh(Layout(pp=context.world), channels=edges(plan)))
    stage = CountingStage(context.rank, context.rank == context.world - 1)
    batches = [
        Microbatch.of(torch.full(shape, float(index + 1)), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
        for index in range(microbatches)
    ]
    statistics, _ = Runtime({context.rank: stage}, mesh, shape, torch.float32, "cpu").run(
        plan, batches, step=1, loss_scale=0.5
    )
    dist.barrier()
    gradient = stage.parameter.grad
    return {
        "loss": statistics["loss"].item(),
        "received": stage.received,
        "alive": stage.alive(),
        "alive_in_backward": stage.alive_in_backward,
        "freed_in_backward": stage.freed_in_backward,
        "gradient": None if gradient is None else gradient.item(),
    }
