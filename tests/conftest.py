"""Fixtures of the whole suite."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported anywhere: sums must not depend on a machine's cores

from tests.distributed.pool import RankPool, start_fork_server

start_fork_server()  # imports torch while pytest does

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _same_settings_as_ranks() -> None:
    """The reference in pytest's process must use the matrix products that the ranks use."""
    import torch

    from megalite.training.launch import configure_cpu

    torch.set_num_threads(1)
    configure_cpu()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks: `ranks.run(world, function, *args)` returns each rank's result."""
    pool = RankPool()
    yield pool
    pool.close()
