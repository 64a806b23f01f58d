"""Random configurations over the whole space of options: each trains the same on every topology, or is refused with one
clear message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.random_configurations import Draw, Files, draw, prove

SEEDS = range(16)  # the long form draws further ones


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files.write(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("seed", SEEDS)
def test_trains_or_is_refused(seed, files, ranks):
    prove(draw(seed, files), files, ranks)


def test_most_draws_are_legal(files):
    legal = [draw(seed, files).legal for seed in range(60)]
    assert 0.5 < sum(legal) / len(legal) < 0.75


def test_a_legal_draw_must_not_be_refused(files, ranks):
    good = draw(next(seed for seed in SEEDS if draw(seed, files).legal), files)
    bad: Draw = replace(good, options={**good.options, "model.hidden_size": 0})
    with pytest.raises(AssertionError, match="a legal configuration is refused: model.hidden_size = 0"):
        prove(bad, files, ranks)
    assert prove(replace(bad, legal=False), files, ranks) == "refused"
