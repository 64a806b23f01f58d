"""Jobs that observe a schedule: steps that do not wait, and when weight gradients are computed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalite.optimizer.registry import STATE
from megalite.parallel.pipeline.schedule import Action, ActionKind
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer


def advance_and_save(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train without waiting if the schedule allows it, and save; `pending`: whether the last step was still open."""
    trainer = make_trainer(context, config)
    try:
        losses = [result.loss for _ in range(steps) for result in trainer.train_step()]
        pending = trainer.weight_updater.pending is not None
        directory = str(trainer.save())
        losses += [update.totals.loss for update in trainer.weight_updater.take_known()]
        return {"losses": losses, "pending": pending, "directory": directory, "tensors": global_tensors(trainer, STATE)}
    finally:
        trainer.close()


def weight_passes(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """One step, watched from a stage's interface to the runtime.

    Returns an event for the end of each backward and of each weight pass (the tensors whose accumulated gradients it
    changed, and how many reductions over dp this rank has started in this step), each stage's tensors with whether they
    are matrices of a linear layer, the tensors of each bucket, and the order of passes that the schedule has.
    """
    trainer = make_trainer(context, config)
    trainer.step()
    weights, traffic = trainer.store.weights, trainer.mesh.traffic
    started = traffic["all_reduce", "data"]
    events: list[dict[str, Any]] = []

    def gradients() -> dict[str, Tensor]:
        return {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}

    before = gradients()

    def note(kind: str, stage: int) -> None:
        nonlocal before
        now = gradients()
        changed = sorted(name for name, value in now.items() if not value.equal(before[name]))
        events.append(
            {"kind": kind, "stage": stage, "changed": changed, "reductions": traffic["all_reduce", "data"] - started}
        )
        before = now

    passes = trainer.parts.runtime._passes

    def watch(kind: ActionKind) -> None:
        execute = passes[kind]

        def executed(run: Any, action: Action) -> None:
            execute(run, action)
            note(kind.value, action.stage)

        passes[kind] = executed

    watch(ActionKind.BACKWARD)
    watch(ActionKind.WEIGHT)
    try:
        trainer.step()
    finally:
        trainer.close()
    stages = {
        number: {
            name: weight.tensor.dim() == 2 and "embedding" not in name
            for name, weight in sorted(weights.items())
            if weight.spec.unit in stage.units
        }
        for number, stage in trainer.parts.stages.items()
    }
    buckets = [[slot.spec.name for slot in memory.layout.slots] for memory in trainer.store.buckets]
    plan = [(action.kind.value, action.stage) for action in trainer.schedule.compute(trainer.mesh.pp.rank)]
    return {"events": events, "stages": stages, "buckets": buckets, "plan": [each for each in plan if each[0] != "F"]}
