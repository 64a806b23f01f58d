"""What a step over several ranks asks of a GPU: the host waits for its results, and for the numbers of rows that go to
experts.

While it does, the device has other work (`tests.support.device_rules`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import case_of, config_of, write_tokens
from tests.support.device_rules import ASIDE, waits
from tests.support.jobs_experts import MIXTURE

EXPERTS = {**MIXTURE, "mlp_only_layers": []}
CASES: dict[str, dict[str, Any]] = {
    "rows sent, capacity": {"zero": 1, "ep": 2, "model": EXPERTS | {"expert_capacity_factor": 0.7}},
    "rows gathered, biases": {
        "zero": 2,
        "ep": 2,
        "dispatch": "all_gather",
        "model": EXPERTS | {"router_balance": "bias"},
    },
    "experts over tp": {
        "dp": 1,
        "tp": 2,
        "ep": 2,
        "sequence_parallel": True,
        "model": EXPERTS | {"router_balance": "sequence"},
    },
    "weights gathered, recomputed": {"zero": 3, "recompute": "full", "masked": True, "model": {}},
    "replicas, Muon": {"zero": 0, "optimizer": "muon", "model": {}},
    "context": {"dp": 1, "cp": 2, "context": "ring", "model": {}},
    "pipeline, weight passes": {"dp": 1, "pp": 2, "schedule": "zb-h1", "microbatches": 2, "model": EXPERTS},
    "optimistic steps": {"dp": 1, "pp": 2, "schedule": "zb-v", "microbatches": 4, "layers": 4, "model": {}},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_host_waits_for_nothing_that_is_queued_later(case: dict[str, Any], ranks: Any, prefix: str) -> None:
    case = case_of(tied=False, kv_heads=2, vocab_size=96, layers=2, masked=False, dropout=0.0, dp=2) | case
    config = config_of(case, prefix, "bf16", model=case["model"])
    config["train"] |= {
        "grad_clip": 1e3,
        "global_batch_size": 4,
        "micro_batch_size": 4 // (case["dp"] * case["microbatches"]),
    }
    config["parallel"] |= {"ep": case.get("ep", 1), "expert_dispatch": case.get("dispatch", "all_to_all")}
    counted = 2 if case.get("ep", 1) > 1 else 0  # once for each layer
    for faults, waited in ranks.run(2, waits, config):
        assert not faults and len(waited) == counted + 1
        assert all(ASIDE in each and "mm" in each for each in waited[:counted]), (
            "the shared expert is queued when the host waits"
        )
        assert waited[-1], "so is the update"
