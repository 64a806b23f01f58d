"""Whatever the timing of ranks and messages, a run gives the same numbers, bit for bit, and never hangs. Long form: tests/matrix.py."""

from __future__ import annotations

import pytest

from tests.distributed import delays
from tests.distributed.configs import write_tokens

ROUNDS = [(layout, seed) for seed, layout in enumerate([*delays.LAYOUTS, *list(delays.LAYOUTS)[:4]])]  # 20


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), delays.MODEL["vocab_size"])


@pytest.mark.parametrize(("layout", "seed"), ROUNDS)
def test_delays_change_nothing(layout, seed, prefix, ranks):
    delays.prove_undisturbed(layout, 2, range(seed, seed + 1), 0.002, prefix, ranks)
