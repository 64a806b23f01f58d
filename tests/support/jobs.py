"""What the test ranks run: importable functions of (context, …), one call on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.mesh.mesh import Mesh
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors


def mesh_of(context: Any, config: Any) -> Mesh:
    """The mesh of a configuration, kept between jobs: each further 8-rank group costs threads and file descriptors."""
    dims = build.layout(config)
    options = build.mesh_options(config)
    options |= {"channels": tuple(options["channels"])}  # by name: on gloo their edges decide about nothing
    # sizes which decide about no group are left out
    wanted = (replace(dims, virtual_stages=1, microbatches=1), *options.values())
    if wanted not in context.cache:
        context.cache[wanted] = build.make_mesh(config)
    mesh: Mesh = context.cache[wanted]
    mesh.dims = dims
    mesh.traffic.clear()
    return mesh


def train(context: Any, config: dict[str, Any], steps: int, kinds: tuple[str, ...] = ("weight",)) -> dict[str, Any]:
    """Train some steps; every rank returns losses and gradient norms, rank 0 also the whole global tensors.

    As in a run, a step waits for its result only where the schedule does; the last one waits anyway.
    """
    made = from_dict(config)
    trainer = Trainer(made, mesh_of(context, made))
    try:
        results = [result for step in range(steps) for result in trainer.train_step(wait=step == steps - 1)]
        tensors = global_tensors(trainer, kinds)
    finally:
        trainer.close()
    found: dict[str, Any] = {
        "losses": [result.loss for result in results],
        "grad_norms": [result.grad_norm for result in results],
    }
    for key, name in (("dropped", "dropped_tokens"), ("mtp_losses", "mtp_loss")):
        if name in results[0].routing:
            found[key] = [result.routing[name] for result in results]
    if context.rank == 0:
        found["tensors"] = tensors
    return found
