"""Elementwise optimizers and their moments over shards: no layout changes a bit of an update, a code or a scale."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch
from megalite_kernels import moments
from torch import Tensor

from tests.support import jobs, jobs_moments, own_optimizer
from tests.support.configs import case_of, config_of, config_of_one_process, write_tokens
from tests.support.spaces.layouts import Case, world

SMALL = 1e5  # bytes: several buckets
DIVISORS = [0.0, 1.0, nan, 0.5]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW, bf16": {"moments": "bf16"},
    "AdamW, 8bit": {"moments": "8bit", "betas": [0.9, 0.999]},
    "Muon, 8bit": {"name": "muon", "moments": "8bit"},
    "Lion": {"name": "lion"},
    "Lion, 8bit": {"name": "lion", "moments": "8bit"},
    "AdEMAMix": {"name": "ademamix"},
    "AdEMAMix, bf16": {"name": "ademamix", "moments": "bf16"},
    "own, 8bit": {"name": "own", "moments": "8bit"},
}
SHARDED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, layout, store
    "ZeRO-3, four shards": (4, {"dp": 4}, {"zero": 3, "bucket_bytes": SMALL}),
    "two groups of shards, tensor parallel": (8, {"tp": 2, "dp": 4, "dp_shard": 2}, {"zero": 1}),
    "replicated key-value heads": (4, {"tp": 4}, {"zero": 0, "bucket_bytes": SMALL}),
}
SOME = [  # every optimizer and every layout, bf16 and 8 bits where rows are cut
    ("AdamW, bf16", "ZeRO-3, four shards"),
    ("AdamW, bf16", "replicated key-value heads"),
    ("AdamW, 8bit", "ZeRO-3, four shards"),
    ("AdamW, 8bit", "two groups of shards, tensor parallel"),
    ("Muon, 8bit", "two groups of shards, tensor parallel"),
    ("Lion", "two groups of shards, tensor parallel"),
    ("Lion, 8bit", "replicated key-value heads"),
    ("AdEMAMix", "ZeRO-3, four shards"),
    ("AdEMAMix, bf16", "two groups of shards, tensor parallel"),
    ("own, 8bit", "ZeRO-3, four shards"),
]


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path) -> dict[str, Any]:
    chosen = OPTIMIZERS[request.param]
    return chosen | ({"name": own_optimizer.write(tmp_path)} if chosen.get("name") == "own" else {})


@pytest.mark.parametrize("options, layout", SOME, indirect=["options"])
def test_updates_codes_and_scales_are_bitwise_those_of_one_rank(options, layout, ranks):
    """Given gradients; a step with a divisor and one that is skipped; every element that any rank keeps."""
    size, mesh, store = SHARDED[layout]
    (whole,) = ranks.run(1, jobs_moments.stepped, options, {}, {}, DIVISORS)
    # a bucket of one rank has whole tensors
    alone = {name: values for name, _, values in whole}
    seen = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in alone.items()}
    for rank, states in enumerate(ranks.run(size, jobs_moments.stepped, options, mesh, store, DIVISORS)):
        for name, place, values in states:
            assert torch.equal(values, alone[name][place]), f"{name} at {place} on rank {rank}"
            seen[name][place] = True
    assert all(each.all() for each in seen.values()), "some elements are kept nowhere"


MODEL_CASE: Case = case_of(tied=True, kv_heads=2, vocab_size=101, layers=4, masked=True, dropout=0.1, precision="fp64")
MOMENTS = ("weight", "exp_avg", "exp_avg_slow", "exp_avg_sq")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL_CASE["vocab_size"])


@pytest.mark.parametrize(
    "name, layout",
    [
        ("lion", {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zb-v", "zero": 2}),
        ("ademamix", {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4, "sequence_parallel": True, "zero": 1}),
    ],
)
def test_trains_like_one_process(name, layout, ranks, references, prefix):
    case, options = {**MODEL_CASE, **layout}, {"ademamix": {"schedule_steps": 4, "beta3": 0.99}}
    many, one = config_of(case, prefix, "fp64") | options, config_of_one_process(case, prefix) | options
    for config in (many, one):
        config["optimizer"] |= {"name": name}
    got = ranks.run(world(case), jobs.train, many, 2, MOMENTS)
    alone = references.run(jobs.train, one, 2, MOMENTS)
    assert all(rank["losses"] == pytest.approx(alone["losses"], rel=1e-9, abs=0) for rank in got)
    assert got[0]["tensors"].keys() == alone["tensors"].keys()
    for key, value in got[0]["tensors"].items():
        assert (value - alone["tensors"][key]).abs().max() <= 1e-9, key


CHAIN = [("adamw", "fp32"), ("adamw", "8bit"), ("adamw", "bf16"), ("lion", "fp32"), ("adamw", "8bit")]
CONVERTED = "moments of the checkpoint in {} are converted to {}"
NOTES: list[list[str]] = [
    [],
    [CONVERTED.format("fp32", "8bit")],
    [CONVERTED.format("8bit", "bf16")],
    [CONVERTED.format("bf16", "fp32")],
    [
        CONVERTED.format("fp32", "8bit"),
        "the checkpoint is of another optimizer: exp_avg_sq starts at zero, the rest carries on",
    ],
]
LAYOUTS = ({"tp": 2, "dp": 2, "zero": 1}, {"dp": 4, "zero": 3})


def test_state_is_converted_on_resume_on_any_layout(ranks, prefix):
    """What carries over is the nearest number, bitwise the same on both layouts; the rest starts at zero, and its age
    with it."""
    saved: dict[str, Any] = {}
    for number, (name, form) in enumerate(CHAIN):
        results = []
        for layout in LAYOUTS:
            case = {**MODEL_CASE, **layout, "microbatches": 1, "dropout": 0.0}
            config = config_of(case, prefix, "fp32", run={"name": f"moments-{number}-{len(results)}"})
            config["model"] |= {"hidden_size": 64, "intermediate_size": 256, "head_dim": 64}
            config["optimizer"] |= {"name": name, "moments": form}
            config["checkpoint"] = {"allow": ["optimizer"]} | ({"load": saved["directory"]} if number else {})
            results.append(ranks.run(4, jobs_moments.resumed, config, 1, KINDS)[0])
        one, other = results
        assert one["before"].keys() == other["before"].keys()
        assert all(torch.equal(value, other["before"][key]) for key, value in one["before"].items())
        assert one["started"] == ({"exp_avg_sq": 4} if number == 4 else {})
        assert one["notes"][: len(NOTES[number])] == NOTES[number]
        if number:
            check_near(saved["after"], one["before"])
        saved = one


KINDS = ("weight", "exp_avg", "exp_avg_sq", "exp_avg.absmax", "exp_avg_sq.absmax")


def values(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The values of a tensor of state, and how far others may be: half of the steps of bf16 or of the largest codes."""
    kind, _, segment = name.partition("/")
    stored = tensors[name]
    if stored.dtype != torch.uint8:
        return stored.float(), stored.float().abs() / 256
    scales = tensors[f"{kind}.absmax/{segment}"]
    scales = scales.repeat_interleave(stored.shape[1] // scales.shape[1], 1)
    table = moments.code_table(not kind.endswith("_sq"), torch.device("cpu"))
    return table[stored.int()] * scales, 0.00704 * scales


def check_near(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name in after:
        if ".absmax" in name:
            continue
        if name not in before:
            assert name.startswith("exp_avg_sq"), name
            assert not values(after, name)[0].any()
            continue
        (old, one), (new, other) = values(before, name), values(after, name)
        if name.startswith("weight"):
            assert torch.equal(old, new)
        assert ((old - new).abs() <= torch.maximum(one, other)).all(), name
        assert new.any()
