"""Context parallelism is one more axis of the same proof: every method in every layout equals one process, in fp64
within 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.model.blocks.attention.context import Heads, exchange, levels
from megalite.model.cost.records import Share
from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs, jobs_context
from tests.support.configs import write_tokens
from tests.support.spaces.context import FIXED, OPTIONS, SPACE
from tests.support.spaces.space import Case, world

STEPS, TOLERANCE = 2, 1e-9
METHODS = OPTIONS["context"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), FIXED["vocab_size"])


@pytest.mark.parametrize("case", SPACE.table(), ids=SPACE.label)
def test_equals_one_process(case, ranks, references, prefix):
    config, alone = SPACE.configs(case, prefix)
    got = ranks.run(world(SPACE.complete(case)), jobs.train, config, STEPS)
    assert_same_run(got, references.run(jobs.train, alone, STEPS), TOLERANCE, TOLERANCE)


LONGROPE = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 8, "factor": 2.0},
    **{"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [1.0, 1.5, 2.0, 4.0]},
}
MODELS: dict[str, tuple[Case, dict[str, dict[str, Any]]]] = {
    "learned positions that end with the row": (
        {"cp": 4, "context": "gather", "length": 13, "tied": True},
        {"model": {"position": "learned", "max_position_embeddings": 13}},
    ),
    "factors for the length of the row, which no rank holds": (
        {"cp": 4, "context": "ulysses"},
        {"model": {"rope_scaling": LONGROPE}},
    ),
    "soft-cap, tied embeddings on one rank": (
        {"cp": 2, "context": "ring", "schedule": "zb-v", "tied": True},
        {"model": {"attention_softcap": 2.0, "sliding_window": 3}},
    ),
    "adapters with dropout": ({"cp": 2, "context": "ring", "tp": 2}, {"lora": {"rank": 2, "dropout": 0.3}}),
    "sharded over some of the data ranks": ({"cp": 4, "context": "gather", "dp": 2, "zero": 3, "dp_shard": 2}, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_and_groups_equal_one_process(name, ranks, references, prefix):
    changed, sections = MODELS[name]
    case = SPACE.plain(**{"documents": True, "dropout": 0.1, **changed})
    config, alone = SPACE.configs(case, prefix)
    for section, values in sections.items():
        for each in (config, alone):
            each[section] = {**each.get(section, {}), **values}
    got = ranks.run(world(SPACE.complete(case)), jobs.train, config, STEPS)
    assert_same_run(got, references.run(jobs.train, alone, STEPS), TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("context", METHODS)
def test_fp32_is_one_process_to_rounding(context, ranks, references, prefix):
    case = SPACE.plain(context=context, documents=True)
    config, alone = SPACE.configs(case, prefix)
    for each in (config, alone):
        each["train"]["precision"] = "fp32"
    got = ranks.run(2, jobs.train, config, STEPS)
    assert_same_run(got, references.run(jobs.train, alone, STEPS), 1e-5, 2e-5)


# ---- attention alone, for given queries, keys and values

SHAPE = (96, 2, 8, 4, 8)  # sequence, batch, heads, key-value heads, channels


def put_together(results: list[dict[str, Any]]) -> list[torch.Tensor]:
    """out, dq, dk and dv of whole rows, from those of the parts."""
    places = torch.cat([rank["places"] for rank in results])
    parts = [torch.cat(each) for each in zip(*(rank["tensors"] for rank in results), strict=True)]
    return [torch.empty_like(x).index_copy_(0, places, x) for x in parts]


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_attention_is_that_of_one_process(method, cp, masked, ranks):
    """fp64 to rounding; Ulysses bit for bit, where no key-value head goes to several ranks."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        outputs = put_together(ranks.run(cp, jobs_context.attend, method, SHAPE, dtype, masked))
        for got, expected in zip(outputs, jobs_context.whole(SHAPE, dtype, masked), strict=True):
            assert got.dtype == dtype
            if method == "ulysses":
                assert torch.equal(got, expected)
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_ulysses_within_a_ring_is_one_process(kv_heads, ranks):
    """Two groups of two: the inner ranks exchange heads, the groups are a ring that carries the keys and values of half
    of the heads."""
    sequence, batch, heads, _, dim = SHAPE
    shape = sequence, batch, heads, kv_heads, dim
    results = ranks.run(4, jobs_context.attend, "ring", shape, torch.float64, True, 2)
    for got, expected in zip(put_together(results), jobs_context.whole(shape, torch.float64, True), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    kv, width = max(kv_heads, 2), 8
    exchanged = sequence // 4 * (2 * heads + 2 * kv) * batch * dim * width // 2
    hop = sequence // 2 * 2 * (kv // 2) * batch * dim * width
    assert [rank["sent"] for rank in results] == [[exchanged + hop, exchanged + 2 * hop]] * 4
    whole, own = Share(sequence // 4, batch, cp=4, context="ring", context_inner=2), Heads(heads, kv_heads, dim, dim)
    planned = [exchange(*level) for level in levels(whole, own)]
    assert [each.forward * width // 2 for each in planned] == [exchanged, hop], "what plans count"


def test_bf16_partial_results_stay_in_fp32(ranks):
    """Each rank rounds its result once: parts that were rounded before they are merged or added would be several times
    as far off."""
    exact = jobs_context.whole(SHAPE, torch.float64, False)
    alone = jobs_context.whole(SHAPE, torch.bfloat16, False)
    for method in METHODS:
        outputs = put_together(ranks.run(4, jobs_context.attend, method, SHAPE, torch.bfloat16, False))
        for got, of_one, true in zip(outputs, alone, exact, strict=True):
            assert (got.double() - true).abs().mean() <= 1.1 * (of_one.double() - true).abs().mean()


def formula(method: str, cp: int, kv_heads: int, width: int) -> list[int]:
    """Bytes that a rank sends in forward and backward: the table of docs/context-parallel.md."""
    sequence, batch, heads, _, dim = SHAPE
    common = batch * dim * (cp - 1) // cp
    if method == "ulysses":
        return [sequence // cp * (2 * heads + 2 * max(kv_heads, cp)) * width * batch * dim * (cp - 1) // cp] * 2
    keys = sequence * 2 * kv_heads * common
    return [keys * width, keys * width + keys * max(width, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_formulas(method, kv_heads, dtype, ranks):
    sequence, batch, heads, _, dim = SHAPE
    for rank in ranks.run(4, jobs_context.attend, method, (sequence, batch, heads, kv_heads, dim), dtype, False):
        assert rank["sent"] == formula(method, 4, kv_heads, dtype.itemsize)


def test_the_axis_has_a_communicator_of_its_own(ranks):
    assert ranks.run(2, jobs_context.shares_a_communicator) == [False, False]
