"""Fixtures of the proofs on real ranks."""

from __future__ import annotations

import pytest

from tests.support.pool import RankPool
from tests.support.references import References


@pytest.fixture(scope="session")
def references(ranks: RankPool) -> References:
    """`references.run(job, config, *args)`: what one process returns, computed once for each configuration."""
    return References(ranks)
