"""Pairs of options that a table has once proved stay proved: a later table may hold more of them, but loses none.

pairs/SPACE.txt has a line for each option value, `tp=1: pp=1 pp=2 …`, with the values of later options beside which a
case of the table has it.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.support.spaces.covering import SPACES

TOGETHER = {  # options of which every two are proved together
    "layouts": "tp pp dp schedule zero offload sequence_parallel microbatches recompute tied precision optimizer ema",
    "context": "cp context inner parts tp schedule dp zero recompute kv_heads documents window dropout length",
    "experts": "ep tp schedule dp context parts zero groups recompute balance dispatch capacity optimizer",
    "attention": "attention feed_forward tp sequence_parallel context schedule dp ep zero recompute documents window "
    "modules optimizer",
}
FEWEST = {"layouts": 1340, "context": 530, "experts": 654, "attention": 775}


@pytest.mark.parametrize("name", SPACES)
def test_no_recorded_pair_is_lost(name):
    space = SPACES[name]
    lost = space.recorded() - space.covered(space.table())
    assert sorted(" with ".join(sorted(pair)) for pair in lost) == []


@pytest.mark.parametrize("name", SPACES)
def test_every_two_options_are_together_wherever_that_is_legal(name):
    space = SPACES[name]
    assert all(map(space.is_legal, space.table()))
    assert sorted(map(str, space.legal_pairs() - set().union(*map(space.pairs_of, space.table())))) == []
    pairs = {frozenset(option for option, _ in pair) for pair in space.legal_pairs()}
    assert {frozenset(two) for two in combinations(TOGETHER[name].split(), 2)} <= pairs


@pytest.mark.parametrize("name", SPACES)
def test_the_record_is_of_a_whole_table(name):
    assert len(SPACES[name].recorded()) >= FEWEST[name]


@pytest.mark.parametrize(
    "name, pair",
    [
        ("layouts", ("tp=4", "pp=2")),
        ("layouts", ("schedule=zb-v", "zero=3")),
        ("layouts", ("offload=disk", "dropout=0.1")),
        ("layouts", ("schedule=zb-h2", "optimizer=muon")),
        ("layouts", ("zero=3", "recompute=budget")),
        ("layouts", ("offload=cpu", "ema=True")),
        ("context", ("inner=2", "parts=balanced")),
        ("context", ("inner=2", "schedule=zb-v")),
        ("experts", ("ep=4", "schedule=zb-h1")),
        ("experts", ("parts=balanced", "capacity=0.7")),
        ("experts", ("zero=3", "optimizer=muon")),
        ("attention", ("attention=two_latents", "context=pairs")),
        ("attention", ("attention=sinks", "feed_forward=sums")),
    ],
)
def test_the_record_has(name, pair):
    assert frozenset(pair) in SPACES[name].recorded()
