"""The pool of ranks itself: everything distributed is proved through it."""

import os
import re

import pytest
import torch

from tests.support import jobs_pool
from tests.support.pool import RankError, RankPool


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_results_come_in_rank_order_from_real_ranks(ranks: RankPool, world: int) -> None:
    assert ranks.run(world, jobs_pool.place) == [(rank, world, sum(range(world))) for rank in range(world)]


def test_one_rank_has_no_process_group(ranks: RankPool) -> None:
    assert ranks.run(1, jobs_pool.settings)[0]["initialised"] is False


def test_ranks_are_single_threaded_and_yield_to_each_other(ranks: RankPool) -> None:
    for settings in ranks.run(2, jobs_pool.settings):
        assert settings == {"threads": 1, "initialised": True, "policy": os.SCHED_BATCH}


def test_arguments_and_results_may_be_tensors(ranks: RankPool) -> None:
    values = torch.arange(5.0)
    for rank, result in enumerate(ranks.run(2, jobs_pool.scaled, values, 3.0)):
        assert torch.equal(result, values * 3.0 + rank)


def test_processes_group_and_cache_are_kept_while_the_world_stays(ranks: RankPool) -> None:
    ranks.run(4, jobs_pool.place)
    ranks.run(2, jobs_pool.place)
    first = ranks.run(2, jobs_pool.process)
    second = ranks.run(2, jobs_pool.process)
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert [jobs for _, jobs in first] == [1, 1] and [jobs for _, jobs in second] == [2, 2]
    ranks.run(1, jobs_pool.place)
    assert [jobs for _, jobs in ranks.run(2, jobs_pool.process)] == [3, 3], "one process alone does not disturb a group"
    other_world = ranks.run(3, jobs_pool.process)
    assert [pid for pid, _ in other_world[:2]] == [pid for pid, _ in first], "processes outlive their group"
    assert [jobs for _, jobs in other_world] == [1, 1, 1], "the cache does not outlive the group"


def test_a_failing_rank_is_reported_with_traceback_and_output(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*in fail.*ValueError: no such luck.*rank 1 was here"):
        ranks.run(3, jobs_pool.fail, 1)
    assert [rank for rank, _, _ in ranks.run(3, jobs_pool.place)] == [0, 1, 2]


def test_a_hanging_rank_is_reported_with_its_stack(ranks: RankPool) -> None:
    before = ranks.run(2, jobs_pool.process)
    with pytest.raises(RankError, match=r"(?s)ranks \[1\] have not answered.*in wait_for_nothing"):
        ranks.run(2, jobs_pool.hang, 1, timeout=6.0)
    after = ranks.run(2, jobs_pool.process)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after), "a hanging rank must not serve again"
    assert [jobs for _, jobs in after] == [1, 1]


def test_a_dead_rank_is_reported(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 failed:\ndied with exit code 7"):
        ranks.run(2, jobs_pool.die, 0)


def test_a_result_that_cannot_travel_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="pickle"):
        ranks.run(1, jobs_pool.unpicklable)


def test_stopping_leaves_no_process_behind() -> None:
    pool = RankPool()
    pids = [pid for pid, _ in pool.run(2, jobs_pool.process)]
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_only_worlds_that_the_pool_has(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=re.escape("world = 9: the pool has 1 to 8 ranks")):
        ranks.run(9, jobs_pool.place)
