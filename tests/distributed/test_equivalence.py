"""A topology never changes the mathematics: the pairwise table of layouts, each against one process.

The proof settings. fp32, 20 steps: every loss and gradient norm within 1e-5 relative, every weight within 2e-5 absolute.
fp64: within 1e-9, which no real error survives for even one step; 5 steps, and 20 of the full layout. The precision is one of the table's
options; the long form has every layout in both.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.support import jobs, layouts
from tests.distributed.support.configs import STEPS, config_of, config_of_one_process, write_tokens

TOLERANCE = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 2e-5)}  # relative (loss, norm), absolute (weights)
TABLE = layouts.pairwise()
NAMED = [layouts.with_layers({**layouts.NAMED, "precision": precision}) for precision in TOLERANCE]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> dict[int, str]:
    directory = tmp_path_factory.mktemp("data")
    return {size: write_tokens(directory, size) for size in layouts.OPTIONS["vocab_size"]}


def assert_same_run(got: list[dict[str, Any]], expected: dict[str, Any], relative: float, absolute: float) -> None:
    for rank, found in enumerate(got):
        assert found["losses"] == pytest.approx(expected["losses"], rel=relative, abs=0), f"losses on rank {rank}"
        assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=relative, abs=0), f"gradient norms on rank {rank}"
    tensors = got[0]["tensors"]
    assert tensors.keys() == expected["tensors"].keys()
    worst = {name: (value - expected["tensors"][name]).abs().max().item() for name, value in tensors.items()}
    assert max(worst.values()) <= absolute, sorted(worst.items(), key=lambda item: -item[1])[:5]


def test_table_holds_every_legal_pair_and_the_full_layout():
    covered = set().union(*(layouts.pairs_of(case) for case in TABLE))
    assert layouts.legal_pairs() <= covered
    assert all(case in TABLE for case in NAMED)
    assert all(layouts.is_legal(case) for case in TABLE)


@pytest.mark.parametrize("case", TABLE, ids=layouts.name)
def test_trains_like_one_process(case, ranks, prefixes, references):
    prefix, steps = prefixes[case["vocab_size"]], STEPS if case["precision"] == "fp32" or case in NAMED else STEPS // 4
    got = ranks.run(layouts.world(case), jobs.train, config_of(case, prefix, case["precision"]), steps)
    expected = references.run(jobs.train, config_of_one_process(case, prefix), steps)
    assert_same_run(got, expected, *TOLERANCE[case["precision"]])
