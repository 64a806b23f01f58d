"""Rows of several documents through blocks with a state, on the ranks of a test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX
from tests.support.jobs import mesh_of


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
