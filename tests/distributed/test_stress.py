"""Whatever the timing of ranks and messages, a run gives the same numbers, bit for bit, and never hangs. Long form: tests/matrix.py."""

from __future__ import annotations

import pytest

from tests.distributed.support import delays
from tests.distributed.support.configs import write_tokens

# 20: every schedule on two numbers of ranks, every number of ranks from 2 to 8, and four times with everything inside
SIZES = ((2, 7), (6, 4), (3, 5), (4, 3), (5, 2), (4, 6), (2, 8), (5, 4))
ON_PIPELINES = [f"pp{pp}-{schedule}" for schedule, sizes in zip(delays.SCHEDULES, SIZES, strict=True) for pp in sizes]
WITH_ALL = [f"tp2-pp2-dp2-{schedule}" for schedule in ("1f1b", "interleaved-3", "zb-h2", "zb-v")]
ROUNDS = [(layout, seed) for seed, layout in enumerate(ON_PIPELINES + WITH_ALL, start=1)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), delays.MODEL["vocab_size"])


@pytest.mark.parametrize(("layout", "seed"), ROUNDS)
def test_delays_change_nothing(layout, seed, prefix, ranks):
    delays.prove_undisturbed(layout, 4, range(seed, seed + 1), 0.002, prefix, ranks)
