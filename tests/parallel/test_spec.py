"""Specs: what a rank holds is a partition of the whole, and any flat range is a few rectangles of it."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.sections.model import ModelConfig
from megalite.families.presets import preset
from megalite.mesh.layout import Coordinates, Layout
from megalite.model.parameters import model_specs
from megalite.model.spec_builder import padded_vocabulary
from megalite.model.unit_numbers import stage_units
from megalite.parallel.spec import ParamSpec, Segment, holders, parameter_count, rectangles

PUBLISHED = {  # from the models' cards and Hugging Face's num_parameters()
    "gpt2-124m": 124_439_808,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameter_counts(name):
    assert parameter_count(model_specs(ModelConfig(**preset(name)))) == PUBLISHED[name]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_parameter_count_does_not_depend_on_the_layout(tp):
    model = ModelConfig(**preset("llama-3.2-1b"))
    stages = [model_specs(model, tp=tp, units=stage_units([5, 6, 5], stage)) for stage in range(3)]
    assert sum(parameter_count(specs) for specs in stages) == PUBLISHED["llama-3.2-1b"]


segments = st.builds(
    lambda rows, columns, split, replicas, tp: (
        Segment(
            "w",
            (rows * tp, columns * tp) if columns else (rows * tp,),
            min(split, 1 if columns else 0),
            replicas if replicas <= tp else 1,
        ),
        tp,
    ),
    rows=st.integers(1, 5),
    columns=st.integers(0, 4),
    split=st.integers(0, 1),
    replicas=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4]),
)


@given(segments, st.data())
@settings(max_examples=200, deadline=None)
def test_ranges_of_all_ranks_tile_the_global_tensor(segment_and_tp, data):
    segment, tp = segment_and_tp
    whole = torch.arange(segment.numel).view(segment.shape)
    seen = torch.zeros(segment.shape, dtype=torch.int64)
    spec = ParamSpec("w", 0, (segment,))
    for rank in range(tp):
        part = segment.local(Coordinates.on("tp", rank, tp))
        own = whole[tuple(slice(low, low + size) for low, size in zip(part.offsets, part.sizes, strict=True))].reshape(
            -1
        )
        cut = data.draw(st.integers(0, own.numel()))
        for start, stop in ((0, cut), (cut, own.numel())):
            pieces = list(rectangles(spec, Coordinates.on("tp", rank, tp), start, stop))
            assert len(pieces) <= 3
            for flat in pieces:
                place = tuple(slice(low, low + size) for low, size in zip(flat.offsets, flat.sizes, strict=True))
                assert torch.equal(whole[place].reshape(-1), own[flat.start : flat.stop])
                if segment.is_owner(Coordinates.on("tp", rank, 4)):
                    seen[place] += 1
    assert (seen == 1).all()


def test_fused_tensor_is_cut_at_its_segments():
    second = Coordinates.on("tp", 1, 2)
    spec = ParamSpec("qkv", 0, (Segment("q", (4, 3), 0), Segment("k", (2, 3), 0), Segment("v", (2, 3), 0)))
    pieces = list(rectangles(spec, second, 0, prod(spec.local_shape(second))))
    assert [(flat.segment.name, flat.offsets, flat.sizes) for flat in pieces] == [
        ("q", (2, 0), (2, 3)),
        ("k", (1, 0), (1, 3)),
        ("v", (1, 0), (1, 3)),
    ]


@pytest.mark.parametrize(("vocab", "tp"), [(101, 1), (101, 2), (101, 4), (50257, 8), (3, 4), (128256, 3)])
def test_vocabulary_padding_leaves_every_real_row_exactly_once(vocab, tp):
    segment = Segment("embedding.weight", (vocab, 2), 0, padded=padded_vocabulary(vocab, tp))
    parts = [segment.local(Coordinates.on("tp", rank, tp)) for rank in range(tp)]
    assert sum(part.sizes[0] for part in parts) == vocab
    assert len({part.shape for part in parts}) == 1 and parts[0].shape[0] % 8 == 0
    assert [part.offsets[0] for part in parts] == [min(rank * parts[0].shape[0], vocab) for rank in range(tp)]


@pytest.mark.parametrize("rank", range(4))
def test_key_value_heads_are_shared_by_neighbouring_ranks(rank):
    segment = Segment("k", (2 * 8, 5), 0, replicas=2)
    assert segment.local(Coordinates.on("tp", rank, 4)).offsets == (8 * (rank // 2), 0)
    assert segment.is_owner(Coordinates.on("tp", rank, 4)) == (rank % 2 == 0)


def test_holders_are_the_ranks_of_a_stage_by_their_coordinates():
    """By hand: ranks 4 to 7 are the second stage of tp 2 × dp 2; a replicated norm is on all four, a split matrix has
    two halves."""
    layout = Layout(pp=2, dp=2, tp=2)
    matrix, norm = Segment("matrix", (6, 4), 0), Segment("norm", (4,))
    pieces = [
        (held.segment.name, held.part.offsets, held.ranks)
        for held in holders(ParamSpec("both", 1, (matrix, norm)), layout, 1)
    ]
    assert sorted(pieces) == [("matrix", (0, 0), (4, 6)), ("matrix", (3, 0), (5, 7)), ("norm", (0,), (4, 5, 6, 7))]
    shared = holders(ParamSpec("kv", 1, (Segment("kv", (2, 4), 0, replicas=2),)), Layout(tp=4), 0)
    assert [(held.part.offsets[0], held.ranks) for held in shared] == [(0, (0, 1)), (1, (2, 3))]
