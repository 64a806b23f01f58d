"""Positions are those that a microbatch brings: a part of a row is computed as that part of the whole row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.assembly.parts import build_parts, make_mesh
from megalite.config.load import from_dict
from megalite.model.stage import Stage
from megalite.parallel.microbatch import Microbatch

LENGTH, BATCH, FIRST = 40, 2, 16
LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
}
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
LEARNED = {
    "position": "learned",
    "norm": "layer",
    "gated_mlp": False,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
}
DROPOUT = {"embedding_dropout": 0.2, "attention_dropout": 0.2, "residual_dropout": 0.2}
WINDOW = 4


def stage_of(**model: Any) -> Stage:
    """A whole model in fp64, its weights drawn."""
    config = from_dict(
        {
            "model": {**LLAMA, "max_position_embeddings": LENGTH, **model},
            "data": {"train": "none", "sequence_length": LENGTH},
            "train": {"steps": 1, "global_batch_size": BATCH, "micro_batch_size": BATCH, "precision": "fp64"},
        }
    )
    parts = build_parts(config, make_mesh(config), "cpu")
    parts.store.initialize(3)
    parts.store.publish()
    return parts.stages[0]


def rows() -> tuple[Tensor, Tensor]:
    """Random tokens [LENGTH, BATCH], and the samples that they are."""
    return torch.randint(101, (LENGTH, BATCH), generator=torch.Generator().manual_seed(5)), torch.tensor([7, 2**33 + 1])


@torch.no_grad()
def logits(stage: Stage, microbatch: Microbatch) -> Tensor:
    return stage.logits(microbatch.tokens, stage.forward_state(microbatch, step=4, training=True))


@pytest.mark.parametrize("model", [{}, SCALED, LEARNED, DROPOUT, {**LEARNED, **DROPOUT}], ids=str)
@pytest.mark.parametrize("documents", [False, True], ids=["window", "documents"])
def test_the_end_of_a_row_has_the_logits_that_it_has_in_the_row(model: dict[str, Any], documents: bool):
    """What precedes it is out of sight: a window does not reach it, or it belongs to other documents."""
    stage = stage_of(**model, **({} if documents else {"sliding_window": WINDOW}))
    tokens, samples = rows()
    starts = None
    if documents:
        starts = torch.zeros(LENGTH, BATCH, dtype=torch.int64)
        starts[FIRST:], starts[FIRST + 9 :, 1] = FIRST, FIRST + 9
    unseen = FIRST if documents else FIRST + LLAMA["num_hidden_layers"] * (WINDOW - 1)
    whole = logits(stage, Microbatch.of(tokens, tokens, samples, starts))
    its = starts if starts is None else starts[FIRST:]
    end = logits(stage, Microbatch.of(tokens[FIRST:], tokens[FIRST:], samples, its, [(FIRST, LENGTH - FIRST)]))
    torch.testing.assert_close(end[unseen - FIRST :], whole[unseen:], rtol=1e-12, atol=1e-12)
    # logits do not show how far everything is rotated
    if not documents and ("position" in model or "attention_dropout" in model):
        elsewhere = logits(stage, Microbatch.of(tokens[FIRST:], tokens[FIRST:], samples))
        assert (elsewhere - end).abs().max() > 1e-3


@pytest.mark.parametrize("segments", [((FIRST, 20),), ((0, 10), (30, 10)), ((10, 5), (20, 15))], ids=str)
def test_tables_of_parts_are_those_of_the_row_and_made_once(segments: tuple[tuple[int, int], ...]):
    stage = stage_of(**SCALED)
    tokens, samples = rows()
    whole = stage.forward_state(Microbatch.of(tokens, tokens, samples), step=0, training=False).rotary
    part = tokens[:20]
    parts, again = (
        stage.forward_state(Microbatch.of(part, part, samples, segments=segments), 0, False).rotary for _ in range(2)
    )
    assert whole is not None and parts is not None and again is not None
    its = [position for start, length in segments for position in range(start, start + length)]
    for ours, theirs, same in zip(parts, whole, again, strict=True):
        assert torch.equal(ours, theirs[its])
        assert ours is same


def test_rows_may_stand_at_positions_of_their_own():
    """As the tokens that a cache is extended by do: nothing that one row brings is kept for another."""
    stage = stage_of()
    tokens, samples = rows()
    whole = stage.forward_state(Microbatch.of(tokens, tokens, samples), step=0, training=False).rotary
    assert whole is not None
    for places in ([3, 11], [11, 25]):
        one = Microbatch(tokens[:1], tokens[:1], torch.tensor([places]), samples)
        tables = stage.forward_state(one, step=0, training=False).rotary
        assert tables is not None
        assert all(torch.equal(ours[0], theirs[places, 0]) for ours, theirs in zip(tables, whole, strict=True))
