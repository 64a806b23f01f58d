"""`megalite train --nproc MIN:MAX`: runs that lose ranks and take them back."""

from __future__ import annotations

from megalite.monitoring.report.run import read
from megalite.monitoring.starts import read as read_starts
from tests.support.faults.elastic_runs import prove


def test_a_run_that_loses_a_rank_and_takes_it_back_is_the_run_that_never_changed(tmp_path, ranks):
    """Ten changes of each of several layouts, and of nodes, are in the long form (tests/matrix.py)."""
    prove("pair", 0, 2, tmp_path, ranks)
    run = tmp_path / "runs" / "elastic-pair-0"
    parts = [(each.first, each.last, each.ranks, each.sizes()["dp"]) for each in read(run).segments]
    assert parts == [(1, 2, 2, 2), (3, 4, 1, 1), (5, 6, 2, 2)], "a report tells the layouts apart"
    changes = [start.change for start in read_starts(run)]
    assert [(change["ranks"], change["layout"], change["state"]) for change in changes] == [
        (2, "tp 1 · pp 1 · dp 2", None),
        (1, "tp 1 · pp 1 · dp 1", "memory"),
        (2, "tp 1 · pp 1 · dp 2", "memory"),
    ]
    assert "seconds" not in changes[0] and all(0 < change["seconds"] < 600 for change in changes[1:])
