"""Recomputation by operations and by budget, on ranks: bit for bit what keeping everything gives. See
`test_bitwise.py`."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.recompute import OPERATIONS
from tests.distributed.test_bitwise import MODEL, assert_bitwise, run
from tests.support import jobs
from tests.support.configs import SINGLE, write_tokens
from tests.support.jobs_experts import configs

BASE = {**SINGLE, **MODEL}  # with dropout
SOME = "attn_norm+qkv+attention+mlp_norm+mlp_in,scores+mlp_norm,residual+mlp_in+mlp_out,none,attn_norm+residual"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"microbatches": 2},
    "pp 2, 1f1b": {"pp": 2, "microbatches": 4},
    "pp 2, zb-v": {"pp": 2, "microbatches": 4, "schedule": "zb-v"},
    "tp 2, sp": {"tp": 2, "sequence_parallel": True, "microbatches": 2},
    "dp 2, zero 3": {"dp": 2, "zero": 3, "microbatches": 2},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_operations_change_no_bit(layout, ranks, prefix):
    case = {**BASE, **LAYOUTS[layout]}
    got, expected = run(ranks, prefix, {**case, "recompute": SOME}), run(ranks, prefix, case)
    assert_bitwise(got, expected)


@pytest.mark.parametrize(
    "layout", [{"cp": 2, "context": "ulysses", "ep": 2}, {"cp": 2, "context": "ring"}, {"tp": 2, "ep": 2}], ids=str
)
def test_experts_and_parts_of_sequences(layout, ranks, tmp_path):
    config, _ = configs(write_tokens(tmp_path, 96), zero=1, **layout)
    again = {**config, "train": {**config["train"], "recompute": "+".join(OPERATIONS)}}
    got, expected = (ranks.run(2, jobs.train, each, 2) for each in (again, config))
    assert_bitwise(got, expected)


def test_a_trainer_resolves_a_budget(ranks, prefix):
    """Alike on every rank; the least that is possible, which recomputes most."""
    case = {**BASE, "pp": 2, "microbatches": 4}
    got = run(ranks, prefix, {**case, "recompute": "budget"}, train={"grad_clip": 0.0, "memory_budget": 9.6e5})
    assert_bitwise(got, run(ranks, prefix, case))
