"""A topology never changes the mathematics: the pairwise table of layouts, each against one process.

The proof settings. fp32, 10 steps: every loss and gradient norm within 1e-5 relative, every weight within 2e-5
absolute. fp64: within 1e-9, which no real error survives for even one step; 5 steps. The full layout trains 20 steps in
both. The precision is one of the table's options; the long form has more layouts in both.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import jobs
from tests.support.configs import STEPS, config_of, config_of_one_process, write_tokens
from tests.support.pool import RankPool
from tests.support.references import References
from tests.support.spaces.layouts import OPTIONS, SPACE
from tests.support.spaces.space import world

TOLERANCE = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 2e-5)}  # relative (loss, norm), absolute (weights)
TABLE = SPACE.table()


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> dict[int, str]:
    directory = tmp_path_factory.mktemp("data")
    return {size: write_tokens(directory, size) for size in OPTIONS["vocab_size"]}


def assert_same_run(got: list[dict[str, Any]], expected: dict[str, Any], relative: float, absolute: float) -> None:
    for rank, result in enumerate(got):
        assert result["losses"] == pytest.approx(expected["losses"], rel=relative, abs=0), f"losses on rank {rank}"
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=relative, abs=0), (
            f"gradient norms on rank {rank}"
        )
    tensors = got[0]["tensors"]
    assert tensors.keys() == expected["tensors"].keys()
    worst = {name: (value - expected["tensors"][name]).abs().max().item() for name, value in tensors.items()}
    assert max(worst.values()) <= absolute, sorted(worst.items(), key=lambda item: -item[1])[:5]


def assert_trains_like_one_process(
    ranks: RankPool, references: References, case: dict[str, Any], prefix: str, model: dict[str, Any], steps: int
) -> None:
    """In fp64 within 1e-9. model: fields besides those of the case."""
    one, several = config_of_one_process(case, prefix), config_of(case, prefix, "fp64", model=model)
    one["model"] |= model
    got = ranks.run(world(case), jobs.train, several, steps)
    assert_same_run(got, references.run(jobs.train, one, steps), 1e-9, 1e-9)


def test_the_table_has_the_full_layout():
    assert all(case in TABLE for case in SPACE.named)


@pytest.mark.parametrize("case", TABLE, ids=SPACE.label)
def test_trains_like_one_process(case, ranks, prefixes, references):
    steps = STEPS if case in SPACE.named else STEPS // (2 if case["precision"] == "fp32" else 4)
    kinds = ("weight", "ema") if case["ema"] else ("weight",)
    config, alone = SPACE.configs(case, prefixes[case["vocab_size"]])
    got = ranks.run(world(case), jobs.train, config, steps, kinds)
    assert_same_run(got, references.run(jobs.train, alone, steps, kinds), *TOLERANCE[case["precision"]])
