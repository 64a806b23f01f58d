"""Latent attention, sinks, routers with groups or biases, and multi-token prediction train on every layout as on one
process.

fp64, 2 steps, within 1e-9: losses, gradient norms, weights. Each kind of attention is in a model with each kind of
router: DeepSeek-V3 has two latents, groups by sums and a module that predicts a second token, gpt-oss has sinks and
biases.
"""

from __future__ import annotations

import pytest

from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs
from tests.support.configs import write_tokens
from tests.support.jobs_experts import BASE
from tests.support.spaces.attention import SPACE
from tests.support.spaces.space import world

STEPS = 2


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), BASE["vocab_size"])


@pytest.mark.parametrize("case", SPACE.table(), ids=SPACE.label)
def test_trains_like_one_process(case, ranks, references, prefix):
    config, alone = SPACE.configs(case, prefix)
    got = ranks.run(world(SPACE.complete(case)), jobs.train, config, STEPS)
    expected = references.run(jobs.train, alone, STEPS)
    assert_same_run(got, expected, 1e-9, 1e-9)
    for result in got:
        assert result.get("mtp_losses") == (
            pytest.approx(expected["mtp_losses"], rel=1e-9, abs=0) if case["modules"] else None
        )
