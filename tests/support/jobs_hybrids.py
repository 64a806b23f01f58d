"""Blocks with a state on the ranks of a test: rows of several documents, a run that is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.pipeline.schedule import ActionKind
from megalite.training.fit import fit
from tests.support.jobs import make_trainer, mesh_of


def losses_of_documents(context: Any, config: dict[str, Any], documents: list[list[int]]) -> list[float]:
    """The loss of each document in one row of all of them, one after the other."""
    parsed = from_dict(config)
    mesh = mesh_of(context, parsed)
    parts = build.build_parts(parsed, mesh, "cpu")
    parts.store.initialize(0)
    make, (stage,) = build.microbatch_maker(parsed, mesh.cp), parts.runtime.stages.values()
    tokens = torch.tensor([token for document in documents for token in document]).unsqueeze(1)
    firsts = [sum(map(len, documents[:number])) for number in range(len(documents))]
    start = torch.cat([torch.full((len(each), 1), first) for first, each in zip(firsts, documents, strict=True)])
    losses = []
    for first, document in zip(firsts, documents, strict=True):
        targets = torch.full_like(tokens, IGNORE_INDEX)
        targets[first : first + len(document) - 1, 0] = torch.tensor(document[1:])
        microbatch = make(tokens.clone(), targets, torch.arange(1), start.clone())
        with torch.no_grad():
            state = stage.forward_state(microbatch, 0, training=False)
            loss: Tensor = stage(microbatch.tokens, microbatch, state, 1.0).value
        losses.append(all_reduce(loss.detach().double().view(1), mesh.cp).wait().item())
    return losses


def fit_until_killed_in(context: Any, config: dict[str, Any], step: int) -> None:
    """A run of which the last rank is killed as it begins a backward of a step."""
    trainer = make_trainer(context, config)
    activity = trainer.mesh.activity

    def kill(place: Any) -> None:
        if activity.step == step and getattr(place, "kind", None) is ActionKind.BACKWARD:
            os.kill(os.getpid(), signal.SIGKILL)

    if context.rank == context.world - 1:
        activity.listeners += (kill,)
    fit(trainer)
