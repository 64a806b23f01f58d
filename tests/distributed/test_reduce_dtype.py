"""Gradients that travel as bf16 are added in fp32, to the last bit as the sum of what each rank rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.mesh.layout import Coordinates
from tests.support import jobs
from tests.support.configs import case_of, config_of, write_tokens
from tests.support.jobs_reduction import SPECS, random_gradients, reduced, segments, whole
from tests.support.spaces.layouts import Case

NARROW = torch.bfloat16


def rounded(value: Tensor) -> Tensor:
    return value.to(NARROW).float()


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def expected(gradients: dict[str, Tensor], zero: int, dp_shard: int | None) -> dict[str, Tensor]:
    """Round each rank's contribution, add in rank order in fp32; where every rank needs the sum of three or more, round
    it once more."""
    dp, totals = len(gradients["bias"]), {}
    for name, value in segments(gradients).items():
        ranks = list(value)  # [microbatches, *shape] each
        if zero < 2:
            ranks = [in_order(list(rank)).unsqueeze(0) for rank in ranks]
        group = 1 if zero == 0 else dp_shard or dp
        sums = []
        for first in range(0, dp, group):
            members = ranks[first : first + group]
            rounds = [in_order([rounded(member[index]) for member in members]) for index in range(len(members[0]))]
            sums.append(in_order(rounds) if group > 1 else members[0][0])
        total = in_order([rounded(each) for each in sums]) if len(sums) > 1 else sums[0]
        totals[name] = rounded(total) if len(sums) > 2 else total
    return totals


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"dp {dp}, ZeRO-{zero}": (dp, {"zero": zero}) for dp in (2, 3, 4) for zero in (0, 1, 2, 3)},
    **{f"dp 4 in groups of 2, ZeRO-{zero}": (4, {"zero": zero, "dp_shard": 2}) for zero in (1, 3)},
    "dp 3, one bucket": (3, {"zero": 1, "bucket_bytes": 1e9}),
    "dp 3, torch's collectives, ZeRO-0": (3, {"zero": 0, "as_nccl": True}),
    "dp 2, torch's collectives, ZeRO-0": (2, {"zero": 0, "as_nccl": True}),
    "dp 3, torch's collectives, ZeRO-2": (3, {"zero": 2, "as_nccl": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_is_the_sum_of_the_rounded(case, ranks):
    dp, options = CASES[case]
    steps = [random_gradients(dp, microbatches=3, seed=seed) for seed in range(2)]
    got = ranks.run(dp, reduced, steps, {**options, "reduce_dtype": NARROW})
    assert got[0]["buckets"] == (1 if "bucket_bytes" in options else 3)
    for step, gradients in enumerate(steps):
        sums = whole(got, step)
        for name, value in expected(gradients, options["zero"], options.get("dp_shard")).items():
            assert torch.equal(sums[name], value), (step, name)


@pytest.mark.parametrize("zero, value", [(0, 1 + 2**-7), (1, 1 + 3 * 2**-9), (2, 1 + 3 * 2**-9), (3, 1 + 3 * 2**-9)])
def test_small_addends_are_not_lost(zero, value, ranks):
    """Next to 1, bf16 has steps of 1/128: a sum kept in bf16 would stay 1 however many ranks add 1/512."""
    gradients = {spec.name: torch.full((4, 1, *spec.local_shape(Coordinates())), 2.0**-9) for spec in SPECS}
    for each in gradients.values():
        each[0] = 1.0
    sums = whole(ranks.run(4, reduced, [gradients], {"zero": zero, "reduce_dtype": NARROW}), 0)
    assert all((each == value).all() for each in sums.values())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_half_the_bytes_travel(zero, ranks):
    steps = [random_gradients(4)]
    narrow, wide = (
        ranks.run(4, reduced, steps, {"zero": zero, "reduce_dtype": dtype, "bucket_bytes": 1e9})
        for dtype in (NARROW, None)
    )
    assert narrow[0]["bytes"] >= 3 / 4 * 2 * sum(segment.numel for spec in SPECS for segment in spec.segments)
    # so few bytes are swapped whole by plain ZeRO-0: three times a bucket, not 3/4 twice
    factor = 4 if zero == 0 else 2
    assert [factor * rank["bytes"] for rank in narrow] == [rank["bytes"] for rank in wide]


LAYOUTS: dict[str, Case] = {
    "dp 2, ZeRO-1, kept apart": {"dp": 2, "zero": 1, "tied": True},
    "dp 4, ZeRO-0": {"dp": 4, "zero": 0},
    "tp 2, pp 2, dp 2, ZeRO-3, tied": {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "tied": True, "sequence_parallel": True},
    "dp 4 in groups of 2, ZeRO-2": {"dp": 4, "zero": 2, "dp_shard": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_follows_that_of_wide_gradients(layout, ranks, tmp_path):
    model = case_of(tied=False, kv_heads=2, vocab_size=101, layers=4, masked=True, dropout=0.0, microbatches=2)
    case = {**model, **LAYOUTS[layout]}
    results = {}
    for dtype in ("fp32", "bf16"):
        config = config_of(case, write_tokens(tmp_path, 101), run={"deterministic": "apart" in layout})
        config["parallel"] |= {"reduce_dtype": dtype, "dp_shard": case.get("dp_shard")}
        got = ranks.run(case["tp"] * case["pp"] * case["dp"], jobs.train, config, 4)
        assert all(rank["losses"] == got[0]["losses"] and rank["grad_norms"] == got[0]["grad_norms"] for rank in got)
        results[dtype] = got[0]
    assert results["bf16"]["losses"] == pytest.approx(results["fp32"]["losses"], rel=1e-4)
    assert results["bf16"]["grad_norms"] == pytest.approx(results["fp32"]["grad_norms"], rel=2e-3)
    assert results["bf16"]["grad_norms"] != results["fp32"]["grad_norms"]
