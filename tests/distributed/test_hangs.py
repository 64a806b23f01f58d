"""What `megalite explain` says of ranks that really hang. Other cases, of records made by hand, are in
tests/training/test_hang.py."""

from __future__ import annotations

from pathlib import Path

from megalite.training.hang import Explanation
from tests.support.faults.hangs import CASES, PLANS, explained


def test_four_hangs_of_one_run(tmp_path: Path) -> None:
    explanations: dict[str, Explanation] = dict(explained(CASES, tmp_path))
    assert {case: each.culprit for case, each in explanations.items()} == dict.fromkeys(CASES, 1), explanations
    waiting = {case: [wait.rank for wait in each.waits if wait.on == 1] for case, each in explanations.items()}
    assert waiting == dict.fromkeys(CASES, [0])
    computation, loader, save, skipped = explanations.values()
    assert computation.unmatched == "RB0.1<1"
    assert computation.instead.startswith("it was in step 2, B1.1, action ") and "hangs.py" in computation.instead
    assert loader.unmatched == "RB0.0<1" and loader.instead.startswith("it was in step 4, reading its batch (")
    assert loader.instead.endswith(" in step)") and "loader.py" in loader.instead
    assert save.instead.startswith("it was in step 5, saving (") and "hangs.py" in save.instead
    assert str(skipped.unmatched).startswith("all_reduce over world, collective ")
    assert skipped.instead.startswith("it skipped this operation: it was in step 8, F1.0")


def test_ranks_with_different_plans(tmp_path: Path) -> None:
    """Rank 1 has one microbatch less: it has ended its plan, while rank 0 waits for the last backward."""
    ((_, explanation),) = explained(PLANS, tmp_path)
    assert (explanation.culprit, explanation.unmatched) == (1, "SF0.3>1")
    assert (
        "its plan does not contain RF1.3<0" in explanation.instead
        and "the ranks have different plans" in explanation.instead
    )
