"""`megalite train --nproc MIN:MAX`: runs that lose ranks and take them back."""

from __future__ import annotations

from tests.support.faults.elastic_runs import prove


def test_a_run_that_loses_a_rank_and_takes_it_back_is_the_run_that_never_changed(tmp_path, ranks):
    """Ten changes of each of four layouts are in the long form (tests/matrix.py)."""
    prove("pair", 0, 2, tmp_path, ranks)
