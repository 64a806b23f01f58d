"""Whatever the timing of ranks and messages, a run gives the same numbers, bit for bit, and never hangs. Long form:
tests/matrix.py."""

from __future__ import annotations

import pytest

from tests.support.configs import write_tokens
from tests.support.faults import delays

# Each kind of backward (whole, split, split on a V), an odd number of ranks, and everything inside. The long form has
# every schedule.
ROUNDS = [("pp3-interleaved-2", 3), ("pp4-zb-h2", 6), ("tp2-pp2-dp2-zb-v", 10)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), delays.MODEL["vocab_size"])


@pytest.mark.parametrize(("layout", "seed"), ROUNDS)
def test_delays_change_nothing(layout, seed, prefix, ranks):
    delays.prove_undisturbed(layout, 4, range(seed, seed + 1), 0.002, prefix, ranks)
