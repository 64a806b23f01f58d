"""Jobs of the test ranks: importable functions of (context, …), which every rank calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.mesh.mesh import Mesh
from megalite.training.trainer import StepResult, Trainer
from megalite.training.verify import global_tensors


def mesh_of(context: Any, config: Any) -> Mesh:
    """The mesh of a configuration, shared between jobs: each 8-rank group costs threads and file descriptors."""
    dims = build.layout(config)
    options = build.mesh_options(config)
    options |= {"channels": tuple(options["channels"])}  # names only: on gloo their edges make no difference
    # without the sizes that groups do not depend on
    key = (replace(dims, virtual_stages=1, microbatches=1), *options.values())
    mesh: Mesh = context.cached(key, lambda: build.make_mesh(config))
    mesh.dims = dims
    mesh.traffic.clear()
    return mesh


def make_trainer(context: Any, config: dict[str, Any]) -> Trainer:
    """A trainer on the mesh that this configuration shares with other jobs."""
    parsed = from_dict(config)
    return Trainer(parsed, mesh_of(context, parsed))


def numbers(results: list[StepResult]) -> dict[str, Any]:
    return {"losses": [result.loss for result in results], "grad_norms": [result.grad_norm for result in results]}


def train(context: Any, config: dict[str, Any], steps: int, kinds: tuple[str, ...] = ("weight",)) -> dict[str, Any]:
    """Train some steps; every rank returns losses and gradient norms, rank 0 also the whole global tensors.

    As in a run, a step waits for its result only where the schedule does; the last one waits anyway.
    """
    trainer = make_trainer(context, config)
    try:
        results = [result for step in range(steps) for result in trainer.train_step(wait=step == steps - 1)]
        tensors = global_tensors(trainer, kinds)
    finally:
        trainer.close()
    report = numbers(results)
    for key, name in (
        ("dropped", "dropped_tokens"),
        ("mtp_losses", "mtp_loss"),
        ("indexer_losses", "indexer_loss"),
    ):
        if name in results[0].of_model:
            report[key] = [result.of_model[name] for result in results]
    if context.rank == 0:
        report["tensors"] = tensors
    return report
