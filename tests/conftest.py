"""Fixtures of the whole suite."""

import ctypes
import gc
import os
from pathlib import Path


def _has_gpu() -> bool:
    """Whether the driver has a GPU. torch is not imported: on import it reads the environment variables below."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


HAS_GPU = _has_gpu()
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported anywhere: sums must not depend on the number of cores
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted, here and in the ranks

from tests.support.pool import RankPool, start_fork_server  # noqa: E402

start_fork_server()  # imports torch while pytest does

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("any machine", deadline=None)  # an example's time depends on the machine's load
settings.load_profile("any machine")


COMPONENTS = Path(__file__).parent / "components"
LONGEST = "test_killed_commands.py"  # it waits more than it computes: started first, it leaves processors to others


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else ()
        if "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in parameters:  # the fixture
            item.add_marker("ranks")
        if COMPONENTS in item.path.parents:
            item.add_marker("component")
    for marker in ("manual", "component"):
        if marker not in config.option.markexpr:
            items[:] = [item for item in items if item.get_closest_marker(marker) is None]
    items.sort(key=lambda item: item.path.name != LONGEST)


def pytest_collection_finish() -> None:
    # thousands of tests, and what they import, live to the end: a full collection would traverse them each time
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not HAS_GPU and item.get_closest_marker("gpu") is not None:
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session", autouse=True)
def _same_settings_as_ranks() -> None:
    """The reference in pytest's process must use the ranks' library of matmuls."""
    import torch

    from megalite.launch.process import configure_cpu

    torch.set_num_threads(1)
    configure_cpu()


@pytest.fixture(autouse=True)
def _exact_matmuls_on_a_gpu(request: pytest.FixtureRequest, _same_settings_as_ranks: None) -> Iterator[None]:
    """GPU tests do not use the setting of fast fp32 matmuls on a CPU: on a GPU it rounds their inputs to TF32."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real gloo ranks: `ranks.run(world, function, *args)` returns each rank's result."""
    pool = RankPool()
    yield pool
    pool.close()
