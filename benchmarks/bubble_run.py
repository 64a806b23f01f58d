"""Measured processes of `benchmarks.bubble`: `python -m benchmarks.bubble_run SPEC.json`, under torchrun."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measure import finish, read_spec
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.microbatch import Microbatch, StageOutput
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.runtime import Runtime
from megalite.parallel.pipeline.send_recv_actions import CHANNELS, with_communication
from megalite.parallel.weight_grad_queue import WeightGradQueue, WeightMatmul
from megalite.system.clock import ActionTiming

SHAPE = (64, 1, 64)  # 16 KB per message


class StageSeconds(NamedTuple):
    """Seconds of one microbatch on a stage."""

    forward: float
    input_backward: float
    weight_backward: float


class _Pass(torch.autograd.Function):
    """Sleeps for the time of a stage in forward and backward, and returns new tensors to send."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: PacedStage) -> Tensor:
        ctx.stage = stage
        stage.spend(stage.passes.forward)
        return x + 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        stage: PacedStage = ctx.stage
        stage.spend(stage.passes.input_backward)
        stage.weight_grads.put(WeightMatmul(stage, grads[0], grads[0]))  # type: ignore[arg-type]
        return grads[0].clone(), None


class PacedStage:
    """Stage and weights for the runtime whose passes take a known time instead of computing."""

    def __init__(
        self,
        last: bool,
        passes: StageSeconds,
        spend: Callable[[float], None],
        weight_grads: WeightGradQueue,
        dtype: torch.dtype = torch.float32,
    ):
        self.last, self.passes, self.spend, self.weight_grads = last, passes, spend, weight_grads
        # the first stage's input requires no gradient
        self.parameter = torch.zeros((), dtype=dtype, requires_grad=True)

    def forward_state(self, microbatch: Microbatch, step: int, training: bool) -> None:
        return None

    def __call__(self, x: Tensor, microbatch: Microbatch, state: None, loss_scale: float) -> StageOutput:
        out: Tensor = _Pass.apply(x + self.parameter, self)
        return StageOutput(out.sum() if self.last else out)

    def add_matmul(self, grad_output: Tensor, inputs: Tensor, sizes: Sequence[int] | None = None) -> None:
        """Compute the weight gradient, immediately or in a W pass."""
        self.spend(self.passes.weight_backward)


def run_window(mesh: Mesh, schedule: str, microbatches: int, steps: int, pass_s: float) -> list[ActionTiming]:
    """Return this rank's actions in a few steps on sleeping stages. All ranks start at the same time."""
    plan = with_communication(build(schedule, mesh.pp.size, microbatches))
    passes = StageSeconds(pass_s, pass_s, pass_s)
    queue = WeightGradQueue()
    stages = {
        stage: PacedStage(stage == plan.stages - 1, passes, time.sleep, queue)
        for stage in plan.stages_of(mesh.pp.rank)
    }
    runtime = Runtime(stages, mesh, SHAPE, torch.float32, "cpu", queue)
    batch = Microbatch.of(torch.zeros(SHAPE), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    dist.barrier()
    ran = []
    for step in range(steps):
        runtime.run(plan, [batch] * microbatches, step=step, loss_scale=1.0)
        ran += runtime.ran
    return ran


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(spec["threads"])
    dist.init_process_group("gloo")
    mesh = Mesh(Layout(pp=spec["ranks"]), channels={channel.name: () for channel in CHANNELS})
    timings: dict[str, list[dict[str, float]]] = {name: [] for name in spec["schedules"]}
    for _ in range(spec["rounds"]):
        for name, windows in timings.items():
            ran = run_window(mesh, name, spec["microbatches"], spec["steps"], spec["pass_s"])
            every: list[Any] = [None] * mesh.pp.size
            dist.all_gather_object(
                every, (ran[0].start, ran[-1].end, sum(one.end - one.start for one in ran))
            )
            starts, ends, busy = zip(*every, strict=True)  # the ranks share a host and its clock
            windows.append({"wall_s": max(ends) - min(starts), "busy_s": sum(busy)})
    finish(spec, timings if mesh.rank == 0 else None)


if __name__ == "__main__":
    main()
