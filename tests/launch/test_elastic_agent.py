"""The agent of `--nproc MIN:MAX`, with ranks that import nothing: which ranks it starts again, and when it gives up."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megalite.checkpoint.copies import DIRECTORY as COPIES
from megalite.launch.agent import Launch, launch
from megalite.launch.exit_status import END_FILE
from megalite.launch.output import LOGS, RETURN_FILE
from megalite.launch.signals import RESIZE_SIGNAL
from megalite.launch.slots import LOST_AT

HEAD = f"""
import os, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
got = []
signal.pthread_sigmask(signal.SIG_SETMASK, [])
open(f"{{DIRECTORY}}/{{start}}-{{rank}}-{{world}}", "w").close()
open(os.path.join(os.environ["{COPIES}"], f"{{start}}-{{rank}}"), "w").close()
def changed():  # this start follows a change of the number of ranks
    return "{LOST_AT}" in os.environ
def all_up():
    while any(not os.path.exists(f"{{DIRECTORY}}/{{start}}-{{each}}-{{world}}") for each in range(world)):
        time.sleep(0.01)
def copy():  # as the ranks do when they are asked to stop
    os.mkdir(os.path.join(os.environ["{COPIES}"], "step_00000007"))
def wait_for_a_signal():
    signal.signal({int(RESIZE_SIGNAL)}, lambda number, frame: got.append(number))
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    all_up()
    while not got:
        time.sleep(0.01)
def die():
    all_up()
    os.kill(os.getpid(), 9)
def end(status):
    if rank == 0:
        open(os.environ["{END_FILE}"], "w").write(str(status))
    sys.exit(0)
def stop_when_asked(returns=False):
    if returns and rank == 0:
        all_up()
        open(os.path.join(os.environ["{LOGS}"], "{RETURN_FILE}"), "w").close()
    wait_for_a_signal()
    end(75)
"""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a launcher changes for itself and its ranks; torch's records name their function by a slow stack."""
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: "")
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    logging.disable(logging.NOTSET)


Started = tuple[int, str, list[int]]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Started]:
    """run(code of a rank, fewest ranks, most ranks) → status, stderr, and the number of ranks of each start."""

    def call(code: str, fewest: int, most: int, *, restarts: int = 0, **options: object) -> Started:
        def save(directory: Path) -> list[str]:
            return [f"saving {path.name}" for path in directory.glob("step_*")]

        options.setdefault("return_after_s", 3600.0)
        options.setdefault("save_copies", save)
        settings = Launch(most, 1, None, None, restarts, 60.0, newest=lambda: None, fewest=fewest, **options)  # type: ignore[arg-type]
        status = launch(settings, ["-c", f"DIRECTORY = {str(tmp_path)!r}" + HEAD + code])
        names = [path.name.split("-") for path in tmp_path.iterdir()]
        sizes = {int(start): int(world) for start, _, world in names}
        assert all(len([name for name in names if int(name[0]) == start]) == size for start, size in sizes.items())
        return status, capfd.readouterr().err, [sizes[start] for start in range(len(sizes))]

    return call


def test_the_others_go_on_without_lost_ranks_and_no_restart_is_counted(run):
    code = "start == 0 and (die() if rank == 1 else time.sleep(60))\nstart == 1 and (die() if rank == 0 else time.sleep(60))\nend(0)"
    status, said, sizes = run(code, 1, 4, used=lambda usable: usable - usable % 2 or 1)
    assert (status, sizes) == (0, [4, 2, 2]), said
    assert said == (
        "rank 1 was killed by SIGKILL; going on with the other ranks\n"
        "rank 0 was killed by SIGKILL; going on with the other ranks\n"
    )


def test_ranks_stop_when_a_place_returns_and_go_on_with_more(run):
    code = "start == 0 and (die() if rank == 2 else time.sleep(60))\nassert changed() == (start > 0)\nstart == 1 and stop_when_asked(returns=True)\nend(0)"
    status, said, sizes = run(code, 2, 3)
    assert (status, sizes) == (0, [3, 2, 3]), said
    assert said.splitlines()[1:] == ["places for ranks have returned; the ranks stop after a step to go on with more"]


def test_a_place_returns_by_itself_after_its_time(run):
    code = "start == 0 and (die() if rank == 0 else time.sleep(60))\nstart == 1 and stop_when_asked()\nend(0)"
    assert run(code, 1, 2, return_after_s=0.5)[::2] == (0, [2, 1, 2])


def test_ranks_that_are_asked_before_their_first_step_are_not_lost(run):
    """They end with the status of a stop, as `end_training_on_signal` lets them."""
    code = (
        "start == 0 and (die() if rank == 0 else time.sleep(60))\n"
        "if start == 1:\n    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\n    time.sleep(60)\nend(0)"
    )
    assert run(code, 1, 3, return_after_s=0.5)[::2] == (0, [3, 2, 3])


def test_fewer_than_the_smallest_number_end_the_run_with_one_message(run):
    code = "die() if rank == start else time.sleep(60)"
    status, said, sizes = run(code, 2, 3)
    assert (status, sizes) == (137, [3, 2])
    assert said.splitlines()[-1] == (
        "rank 1 was killed by SIGKILL; 1 of 3 places for ranks are left, fewer than --nproc 2:3 allows; there is no checkpoint"
    )


def test_below_the_smallest_number_restarts_count_and_keep_the_places(run):
    code = "die() if rank == start and start < 2 else time.sleep(0 if start == 2 else 60)\nend(0)"
    status, said, sizes = run(code, 2, 3, restarts=1)
    assert (status, sizes) == (0, [3, 2, 2]), said
    assert said.splitlines()[1] == "rank 1 was killed by SIGKILL; restarting all ranks"


@pytest.mark.parametrize("known, sizes", [("", [3]), ("device=True", [3, 2])])
def test_an_error_with_a_message_is_no_loss_unless_it_is_of_the_device(known, sizes, run):
    code = (
        "from megalite.config.load import tell_torchrun\n"
        f"if start == 0:\n    (tell_torchrun('it failed', {known}), sys.exit(3)) if rank == 1 else time.sleep(60)\nend(0)"
    )
    status, said, started = run(f"all_up()\n{code}", 1, 3)
    assert started == sizes and status == (3 if len(sizes) == 1 else 0), said


def test_an_end_of_all_ranks_is_no_loss(run):
    code = (
        "other = DIRECTORY + '.pid'\n"
        "if rank == 1:\n    os.symlink(str(os.getpid()), other)\n    time.sleep(60)\n"
        "while not os.path.islink(other):\n    time.sleep(0.01)\n"
        "os.kill(int(os.readlink(other)), 9)\nos.kill(os.getpid(), 9)"
    )
    status, said, sizes = run(code, 1, 4, used=lambda usable: 2)  # two places are left
    assert (status, sizes) == (137, [2]), said


def test_a_signal_is_for_good(run):
    """The ranks save because of it, and the places that have returned start no others."""
    code = "if rank == 0:\n    all_up()\n    os.kill(os.getppid(), signal.SIGTERM)\nwait_for_a_signal()\nend(75)"
    assert run(code, 1, 2) == (75, "", [2])


@pytest.mark.parametrize(
    "code, status, said",
    [
        # a place returns, and while the ranks copy to go on with more a signal arrives
        (
            "start == 1 and (copy(), os.kill(os.getppid(), signal.SIGTERM), time.sleep(0.5), end(75))",
            75,
            ["saving step_00000007"],
        ),
        # a signal after the restart, before the first step
        (
            "start == 1 and (signal.signal(signal.SIGTERM, lambda *_: os._exit(75)), copy(), "
            "os.kill(os.getppid(), signal.SIGTERM), time.sleep(60))",
            75,
            ["saving step_00000007"],
        ),
        # the next start fails
        ("start == 1 and (copy(), sys.exit(2))", 2, ["saving step_00000007"]),
        # another job has the run now
        ("start == 1 and (copy(), sys.exit(73))", 73, []),
    ],
    ids=["stopped for a return", "before the first step", "refused", "in use"],
)
def test_what_only_memory_has_is_saved_when_the_run_ends(run, code, status, said):
    ended, output, sizes = run(f"start == 0 and (die() if rank == 1 else time.sleep(60))\n{code}", 1, 2)
    assert (ended, sizes, output.splitlines()[1:]) == (status, [2, 1], said)


MEETS = """
import sys, time
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from megalite.launch.agent import Launch, launch
whole, started = LocalElasticAgent._rendezvous, []
def meet(agent, group):
    if started:  # another node does not come
        print(*agent._memory.glob("step_*"), flush=True)
        time.sleep(60)
    started.append(whole(agent, group))
LocalElasticAgent._rendezvous = meet
def save(directory):
    return [f"saving {path.name}" for path in directory.glob("step_*")]
sys.exit(launch(Launch(1, 1, None, None, 1, 60.0, newest=lambda: None, save_copies=save), ["-c", sys.argv[1]]))
"""


def test_a_signal_while_the_launcher_waits_for_other_nodes_ends_it_once_copies_are_saved(tmp_path):
    code = f"DIRECTORY = {str(tmp_path)!r}{HEAD}copy()\ndie()"
    launcher = subprocess.Popen([sys.executable, "-c", MEETS, code], stdout=-1, stderr=-1, text=True)
    assert launcher.stdout is not None
    memory = Path(launcher.stdout.readline().strip()).parent
    assert memory.exists()
    launcher.send_signal(signal.SIGTERM)
    said = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 75 and said.splitlines()[1:] == [
        "saving step_00000007",
        "stopped by SIGTERM before the first step",
    ], said
    assert not memory.exists()
