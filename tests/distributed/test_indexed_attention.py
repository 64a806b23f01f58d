"""Attention to the rows that an indexer selects trains like on one process, and selects the same rows.

fp64, 2 steps, within 1e-9: losses, those of the indexers, gradient norms and weights.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs_indexed
from tests.support.configs import write_tokens
from tests.support.jobs_experts import MIXTURE
from tests.support.jobs_indexed import SHARED, configs
from tests.support.spaces.space import world

STEPS = 2
WARMUP = {"train": {"indexer": "warmup"}}
FEW = {"model": {"mlp_only_layers": None, **{k: v for k, v in MIXTURE.items() if k != "mlp_only_layers"}}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "model": SHARED},
    "tp and sp, recomputed": {"tp": 2, "sequence_parallel": True, "recompute": "full", "model": SHARED},
    "zb-h1, named operations recomputed": {
        **{"pp": 2, "schedule": "zb-h1", "microbatches": 4, "recompute": "qkv+attention"},
        **{"model": SHARED},
    },
    "interleaved": {
        "pp": 2,
        "schedule": "interleaved",
        "microbatches": 4,
        "layers": 6,
        "model": {"indexer_types": ["full", "shared", "full", "full", "full", "shared"]},
    },
    "gathered, documents": {"cp": 2, "context": "gather", "recompute": "full", "model": SHARED},
    "gathered, tp and sp": {"cp": 2, "context": "gather", "tp": 2, "sequence_parallel": True, "zero": 3},
    "ulysses": {"cp": 2, "context": "ulysses", "model": SHARED},
    "uneven tokens, zero 1": {"dp": 2, "zero": 1, "microbatches": 2},
    "uneven tokens, zero 3": {"dp": 2, "zero": 3, "microbatches": 2, "recompute": "attention"},
    "no loss": {"dp": 2, "zero": 1, "microbatches": 2, "model": {"index_loss_coef": 0.0}},
    "a module of multi-token prediction": {"tp": 2, "sequence_parallel": True, "model": {"mtp_layers": 1}},
    "experts": {"dp": 2, "ep": 2, "microbatches": 2, **FEW},
    "adapters": {
        **{"tp": 2, "sequence_parallel": True, "lora": {"rank": 3, "alpha": 8.0}},
        **{"model": SHARED | {"index_loss_coef": 0.0}},
    },
    "warm-up, tp and sp": {"tp": 2, "sequence_parallel": True, **WARMUP},
    "warm-up, gathered": {"cp": 2, "context": "gather", "recompute": "full", **WARMUP},
    "warm-up, ulysses and tp": {"cp": 2, "context": "ulysses", "tp": 2, **WARMUP},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    several, one = configs(prefix, **LAYOUTS[name])
    expected = references.run(jobs_indexed.train, one, STEPS)
    got = ranks.run(world({"dp": 1, "cp": 1, "tp": 1, "pp": 1, **LAYOUTS[name]}), jobs_indexed.train, several, STEPS)
    assert_same_run(got, expected, 1e-9, 1e-9)
    selected: jobs_indexed.Selections = {}
    for rank in got:
        assert rank.get("indexer_losses", []) == pytest.approx(expected.get("indexer_losses", []), rel=1e-9)
        assert all(selected.setdefault(key, rows) == rows for key, rows in rank["selections"].items())
    assert selected == expected["selections"]
    assert bool(selected) == ("warm-up" not in name)
