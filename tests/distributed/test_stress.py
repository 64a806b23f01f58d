"""Whatever the timing of ranks and messages, a run gives the same numbers, bit for bit, and never hangs. Long form: tests/matrix.py."""

from __future__ import annotations

import pytest

from tests.distributed.support import delays
from tests.distributed.support.configs import write_tokens

# Ten: every schedule, every number of ranks from 2 to 8, and twice with everything inside.
SIZES = (8, 7, 3, 4, 6, 5, 4, 2)
ON_PIPELINES = [f"pp{pp}-{schedule}" for schedule, pp in zip(delays.SCHEDULES, SIZES, strict=True)]
WITH_ALL = [f"tp2-pp2-dp2-{schedule}" for schedule in ("interleaved-3", "zb-v")]
ROUNDS = [(layout, seed) for seed, layout in enumerate(ON_PIPELINES + WITH_ALL, start=1)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), delays.MODEL["vocab_size"])


@pytest.mark.parametrize(("layout", "seed"), ROUNDS)
def test_delays_change_nothing(layout, seed, prefix, ranks):
    delays.prove_undisturbed(layout, 4, range(seed, seed + 1), 0.002, prefix, ranks)
