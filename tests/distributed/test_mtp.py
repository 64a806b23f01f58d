"""Multi-token prediction trains the same on every layout as on one process: losses, gradient norms and weights.

fp64, 3 steps, within 1e-9, of packed documents; the dense model is a Llama, the other a small DeepSeek-V3. Each layout
has an option that another one has not: where the copies of the embedding are, what is sharded, recomputed, cut or
deferred, one module or two.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs
from tests.support.configs import config_of, config_of_one_process, write_tokens
from tests.support.jobs_experts import BASE
from tests.support.spaces.attention import V3

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, split sequence, tied, two modules": {"tp": 2, "sequence_parallel": True, "tied": True, "modules": 2},
    "pp 2, 1f1b, a copy of the embedding": {"pp": 2},
    "pp 2, zb-h1, tied, two modules": {"pp": 2, "schedule": "zb-h1", "tied": True, "modules": 2},
    "pp 2, zb-v, one table, zero 2, dp 2": {"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 2},
    "dp 2, zero 3, recomputed": {"dp": 2, "zero": 3, "recompute": "full"},
    "cp 2, gather": {"cp": 2, "context": "gather"},
    "v3, tp 2, ep 2, recomputed": {"tp": 2, "ep": 2, "sequence_parallel": True, "recompute": "full", "v3": True},
    "v3, pp 2, dp 2, ep 2, zero 3, two modules": {"pp": 2, "dp": 2, "ep": 2, "zero": 3, "modules": 2, "v3": True},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configs(prefix: str, modules: int = 1, v3: bool = False, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    case = {**BASE, **layout}
    one, several = config_of_one_process(case, prefix), config_of(case, prefix, "fp64")
    several["parallel"] |= {"ep": case["ep"]}
    for config in (one, several):
        config["model"] |= {"mtp_layers": modules} | (V3 if v3 else {"initializer_range": 0.2})
    return several, one


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    layout = LAYOUTS[name]
    several, one = configs(prefix, **layout)
    world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1) * layout.get("cp", 1)
    expected = references.run(jobs.train, one, STEPS)
    got = ranks.run(world, jobs.train, several, STEPS)
    assert_same_run(got, expected, 1e-9, 1e-9)
    for result in got:
        assert result["mtp_losses"] == pytest.approx(expected["mtp_losses"], rel=1e-9, abs=0)


def test_the_order_of_sums_is_that_of_two_stages(ranks, references, prefix):
    """With run.deterministic one process adds the gradients of the embedding in the order of two stages: bitwise the
    same."""
    several, one = (config_of({**BASE, "pp": pp, "tied": True}, prefix, "fp32") for pp in (2, 1))
    for config in (several, one):
        config["model"]["mtp_layers"] = 1
        config["run"]["deterministic"] = True
    got, expected = ranks.run(2, jobs.train, several, 2)[0], references.run(jobs.train, one, 2)
    assert got["losses"] == expected["losses"] and got["mtp_losses"] == expected["mtp_losses"]
    assert all(value.equal(expected["tensors"][name]) for name, value in got["tensors"].items())
