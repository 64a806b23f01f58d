"""Context parallelism is one more axis of the same proof: every method in every layout equals one process, in fp64 within 1e-9."""

from __future__ import annotations

import pytest

from tests.distributed.support import context_layouts, jobs
from tests.distributed.support.configs import write_tokens
from tests.distributed.support.layouts import world
from tests.distributed.test_equivalence import assert_same_run

STEPS, TOLERANCE = 5, 1e-9
TABLE = context_layouts.pairwise()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), context_layouts.FIXED["vocab_size"])


def test_table_holds_every_legal_pair():
    assert context_layouts.legal_pairs() <= set().union(*map(context_layouts.pairs_of, TABLE))


@pytest.mark.parametrize("case", TABLE, ids=context_layouts.name)
def test_equals_one_process(case, ranks, references, prefix):
    config, alone = context_layouts.configs(case, prefix)
    got = ranks.run(world(context_layouts.complete(case)), jobs.train, config, STEPS)
    assert_same_run(got, references.run(jobs.train, alone, STEPS), TOLERANCE, TOLERANCE)
