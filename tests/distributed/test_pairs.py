"""Pairs of options that the layouts table has once proved stay proved: a later table may hold more of them, but loses none.

pairs.txt has a line for each option value, `tp=1: pp=1 pp=2 …`, with the values of later options beside which a case of the table has it.
"""

from __future__ import annotations

from pathlib import Path

from tests.distributed.support import layouts

RECORD = Path(__file__).with_name("pairs.txt")


def recorded() -> set[frozenset[str]]:
    lines = (line.split(": ") for line in RECORD.read_text().splitlines())
    return {frozenset((one, other)) for one, others in lines for other in others.split()}


def covered() -> set[frozenset[str]]:
    pairs = set().union(*map(layouts.pairs_of, layouts.pairwise()))
    return {frozenset(f"{option}={value}" for option, value in pair) for pair in pairs}


def test_no_recorded_pair_is_lost():
    lost = recorded() - covered()
    assert sorted(" with ".join(sorted(pair)) for pair in lost) == []


def test_the_record_is_of_a_whole_table():
    assert len(recorded()) >= 1095
    for pair in (("tp=4", "pp=2"), ("schedule=zb-v", "zero=3"), ("offload=disk", "dropout=0.1"), ("sequence_parallel=True", "tied=True")):
        assert frozenset(pair) in recorded(), pair
