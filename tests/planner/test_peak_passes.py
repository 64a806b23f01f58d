"""The passes at which a rank holds most, against following all of its passes."""

from __future__ import annotations

import random

import pytest

from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.schedule import ActionKind
from megalite.planner.memory.activations import HeldBytes
from megalite.planner.memory.estimate import Profile
from megalite.planner.memory.peak_passes import moments_of

FIELDS = ("saved", "recomputed", "recorded", "stash", "stash_peak")
FIELDS = (*FIELDS, "logits", "logits_stash", "logits_chunk", "workspace")


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks, microbatches", [(1, 3), (3, 7), (4, 12)])
def test_the_fullest_passes_give_the_peaks_of_all(name, ranks, microbatches):
    draw, tables = random.Random(f"{name} {ranks}"), 11
    schedule = build(name, ranks, microbatches, 3 if name == "interleaved" else None)
    splits = ActionKind.WEIGHT in schedule.passes
    fields = [field for field in FIELDS if splits or "stash" not in field]
    for rank in range(ranks):
        stages = {
            stage: [HeldBytes(**{field: draw.randrange(100) for field in fields}) for _ in range(3)]
            for stage in schedule.stages_of(rank)
        }
        profile = Profile.of(schedule, rank, stages, tables)
        held, logits, peaks = tables, 0, [0, 0, 0, 0]

        def note(*parts: int, peaks: list[int] = peaks) -> None:
            peaks[:] = [max(peak, part) for peak, part in zip(peaks, (*parts, sum(parts)), strict=True)]

        for action in schedule.compute(rank):
            units = stages[action.stage]
            if action.kind is ActionKind.FORWARD:
                for unit in units:
                    note(held + unit.saved + unit.recorded, logits, 0)
                    held, logits = held + unit.saved, logits + unit.logits
                    note(held, logits + unit.logits_chunk, 0)
            elif action.kind is ActionKind.BACKWARD:
                for unit in reversed(units):
                    note(held + unit.recomputed + unit.stash_peak, logits, unit.workspace)
                    held, logits = held + unit.stash - unit.saved, logits + unit.logits_stash - unit.logits
                note(held, logits, 0)
            else:
                held, logits = (
                    held - sum(unit.stash for unit in units),
                    logits - sum(unit.logits_stash for unit in units),
                )
        assert [profile.activations, profile.logits, profile.workspace, profile.step] == peaks
        assert (held, logits) == (tables, 0)
        assert len(moments_of(schedule, rank)) <= len(schedule.compute(rank))
