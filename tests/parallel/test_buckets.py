"""Bucket layout: aligned, padded to the shards, whole units together, decaying tensors first."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.sections.model import ModelConfig
from megalite.families.presets import preset
from megalite.mesh.layout import Coordinates
from megalite.model.parameters import model_specs
from megalite.optimizer.registry import OPTIMIZERS, state_spans
from megalite.parallel.sharding.buckets import bucket_layout


def tiny(**changes):
    return ModelConfig(**{**preset("tiny"), "vocab_size": 101, **changes})


@given(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([1e3, 1e5, 1e9]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_layout_invariants(shards, tp, size, tied):
    specs = model_specs(tiny(tie_word_embeddings=tied), tp=tp)
    buckets = bucket_layout(specs, Coordinates.on("tp", tp - 1, tp), {"dense": shards}, size)
    placed = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.spec.name for slot in placed) == sorted(spec.name for spec in specs)
    for bucket in buckets:
        assert len(bucket.units) == 1 or 4 * sum(math.prod(slot.shape) for slot in bucket.slots) <= size
        assert bucket.size % (shards * 64) == 0
        assert all(slot.start % 32 == 0 for slot in bucket.slots)
        assert all(before.stop <= after.start for before, after in zip(bucket.slots, bucket.slots[1:], strict=False))
        assert bucket.slots[-1].stop <= bucket.size
        shard_ranges = [bucket.owned(index) for index in range(shards)]
        assert [low for low, _ in shard_ranges] == [0, *(high for _, high in shard_ranges[:-1])] and shard_ranges[-1][
            1
        ] == bucket.size
        spans = state_spans(bucket, 0, bucket.size, OPTIMIZERS["adamw"].tensors())
        decays = {place: span.decays for span in spans for place in range(span.start, span.stop)}
        for slot in bucket.slots:
            assert decays[slot.start] == decays[slot.stop - 1] == slot.spec.decay


def test_units_stay_whole_and_tied_tensors_alone():
    buckets = bucket_layout(model_specs(tiny(tie_word_embeddings=True)), Coordinates(), {"dense": 2}, 1.0)
    tied = [bucket for bucket in buckets if any(slot.spec.tied for slot in bucket.slots)]
    assert len(tied) == 1 and len(tied[0].slots) == 1
    units = [bucket.units for bucket in buckets if bucket is not tied[0]]
    assert all(len(unit) == 1 for unit in units) and len(set(units)) == len(units)


@pytest.mark.parametrize("shards", [1, 3])
def test_both_copies_of_a_tied_tensor_are_sharded_alike(shards):
    model = tiny(tie_word_embeddings=True)
    ends = [
        bucket_layout(model_specs(model, units=units), Coordinates(), {"dense": shards}, 25e6)
        for units in ([0, 1, 2], [3, 4, 5])
    ]
    first, last = (next(bucket for bucket in buckets if bucket.slots[0].spec.tied) for buckets in ends)
    assert (first.size, first.slots[0].start, first.slots[0].shape) == (
        last.size,
        last.slots[0].start,
        last.slots[0].shape,
    )
