"""`megalite train --nproc`: the agent with ranks that import nothing, so that what it makes of their ends is all there
is."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megalite.checkpoint.copies import DIRECTORY as COPIES
from megalite.commands.start_ranks import main, wanted
from megalite.launch.agent import Launch, launch
from megalite.launch.exit_status import END_FILE
from megalite.launch.local_ranks import run_ranks
from megalite.system.processes import LAUNCHER
from tests.support.configs import write_tokens

HEAD = f"""
import os, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2" and os.environ["{LAUNCHER}"].split()[0] == str(os.getppid())
assert os.path.isdir(os.environ["{COPIES}"]), "a copy outlives the ranks, also without restarts"
def ready():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
def end(status):
    if rank == 0:
        open(os.environ["{END_FILE}"], "w").write(str(status))
"""
WAITS = """
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert signal.SIGINT in blocked and signal.SIGTERM in blocked, "not before there is a handler"
got = []
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, lambda number, frame: got.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
open(f"{DIRECTORY}/up{rank}", "w").close()
while not got:
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def records_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's records name their function by `inspect.stack()`, which below pytest takes a second for each run."""
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: "")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What a launcher changes for itself and its ranks."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    logging.disable(logging.NOTSET)


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """run(code of a rank, restarts, signals to send once all ranks are up) → status and stderr."""

    def call(code: str, *, restarts: int = 0, signals: tuple[int, ...] = (), patience: float = 60.0) -> tuple[int, str]:
        def send() -> None:
            while not all((tmp_path / f"up{rank}").exists() for rank in range(2)):
                time.sleep(0.01)
            for number in signals:
                os.kill(os.getpid(), number)
                time.sleep(0.2)

        if signals:
            threading.Thread(target=send, daemon=True).start()
        options = Launch(2, 1, None, None, restarts, patience, newest=lambda: Path("runs/a/checkpoints/step_00000004"))
        status = launch(options, ["-c", f"DIRECTORY = {str(tmp_path)!r}" + HEAD + code])
        return status, capfd.readouterr().err

    return call


@pytest.mark.parametrize("status", [0, 75, 130])
def test_the_status_is_the_runs_although_the_ranks_end_with_zero(run, status):
    assert run(f"end({status})") == (status, "")


@pytest.mark.parametrize(
    "code, status, said, restarts",
    [
        ("sys.exit(3)", 3, "exited with status 3", 0),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL", 0),
        ("sys.exit(74)", 74, "exited with status 74", 1),  # a restart would compute wrong values again
    ],
)
def test_a_failure_is_one_line_that_names_the_rank_and_the_newest_checkpoint(run, code, status, said, restarts):
    line = f"rank 1 {said}; the newest checkpoint is runs/a/checkpoints/step_00000004\n"
    assert run(f"ready()\ntime.sleep(60) if rank == 0 else None\n{code}", restarts=restarts) == (status, line)


LOSES = """
from megalite.config.load import tell_torchrun
def lose(first):  # as `exit_after_failure` of a rank that has lost another one: it ignores SIGTERM, and ends after it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell_torchrun(f"rank {rank}: all_reduce failed", lost={"rank": first, "reason": f"rank {first} was lost first: its process has ended"})
    open(f"{DIRECTORY}/lost{rank}", "w").close()
    if first < 2:  # the other one has ended, and the agent may not have seen it yet
        wait_for(f"pid{first}")
        status = "/proc/" + os.readlink(f"{DIRECTORY}/pid{first}") + "/stat"
        while os.path.exists(status) and open(status).read().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)
    time.sleep(0.1)
    sys.exit(1)
def wait_for(path):
    while not os.path.lexists(f"{DIRECTORY}/{path}"):
        time.sleep(0.01)
os.symlink(str(os.getpid()), f"{DIRECTORY}/pid{rank}")
"""


@pytest.mark.parametrize(
    "end, said, status",
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", 137),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV", 139),
        ("os.abort()", "was killed by SIGABRT", 134),
        ("sys.exit(3)", "exited with status 3", 3),
    ],
)
def test_the_rank_that_failed_is_named_and_not_those_that_lost_it(run, end, said, status):
    """Both are seen at the same moment, and torch's record of the one that has lost the other is older."""
    ended, printed = run(f"{LOSES}\nready()\nlose(1) if rank == 0 else (wait_for('lost0'), {end})")
    assert (ended, printed) == (status, f"rank 1 {said}; the newest checkpoint is runs/a/checkpoints/step_00000004\n")


def test_where_a_rank_of_another_node_failed_that_one_is_named(run):
    status, said = run(f"{LOSES}\nready()\nlose(7)")
    assert status == 1 and said.startswith("rank 7 was lost first: its process has ended; the newest checkpoint is "), (
        said
    )


def test_a_rank_that_was_killed_for_lack_of_memory_is_said_to_be(run, monkeypatch):
    class Kills:
        def explanation(self, pid):
            return f"out of memory, killed by the kernel ({'a process' if pid else 'none'})"

    monkeypatch.setattr("megalite.launch.agent.MemoryKills", Kills)
    status, said = run("ready()\ntime.sleep(60) if rank == 0 else os.kill(os.getpid(), 9)")
    assert status == 137 and said.startswith(
        "rank 1 was killed by SIGKILL: out of memory, killed by the kernel (a process); "
    ), said


def test_a_rank_that_is_killed_while_the_agent_looks_is_not_one_that_the_agent_ends(run, monkeypatch):
    """Rank 0 is done; rank 1 is killed between the launcher's look at the ranks and the agent's."""

    class Kills:
        def explanation(self, pid):
            return "why"

    whole = LocalElasticAgent._monitor_workers

    def late(agent, group):
        first, second = (each.proc for each in agent._pcontext.subprocess_handlers.values())
        if first.poll() == 0:
            second.kill()
            second.wait()
        return whole(agent, group)

    monkeypatch.setattr("megalite.launch.agent.MemoryKills", Kills)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", late)
    status, said = run("ready()\nif rank == 1: time.sleep(1.0), os.kill(os.getpid(), 9)")
    assert status == 137 and said.startswith("rank 1 was killed by SIGKILL: why; ")


def test_a_rank_that_somebody_terminates_is_the_cause(run):
    """Not its own launcher, which ends the others in the same way."""
    status, said = run(
        f"{LOSES}\nready()\nlose(1) if rank == 0 else (wait_for('lost0'), os.kill(os.getpid(), 15), time.sleep(60))"
    )
    assert (status, said.partition(";")[0]) == (143, "rank 1 was killed by SIGTERM")


def test_without_an_agent_the_rank_that_was_killed_is_named_too(capfd, tmp_path):
    """`run_ranks`, of other commands: rank 0 has failed when rank 1 is first seen to be dead."""
    died = (
        "import os, signal, sys, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(0.3); "
        "sys.exit(1)"
    )

    def hold(*_: object) -> None:
        time.sleep(1.0)

    assert run_ranks(2, ["-c", died], poll=hold) == 137
    assert capfd.readouterr().err == "rank 1 was killed by SIGKILL\n"


@pytest.mark.parametrize("status", [2, 73])
def test_a_rank_that_is_refused_has_said_why_and_is_not_started_again(run, status):
    assert run(f"print('why', file=sys.stderr) if rank == 0 else None\nsys.exit({status})", restarts=3) == (
        status,
        "why\n",
    )


def test_ranks_are_started_again_with_a_line(run):
    line = "rank 1 was killed by SIGKILL; restarting all ranks\n"
    assert run(
        "ready()\nif restart == 0: time.sleep(60 * (rank == 0)); os.kill(os.getpid(), 9)\nend(0)", restarts=1
    ) == (0, line)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_signal_reaches_all_ranks_which_save_and_the_status_says_so(run, number, status):
    assert run(
        f"{WAITS}\nassert got == [{int(number)}]\ntime.sleep(0.3)\nend({status})", signals=(number,), restarts=2
    ) == (status, "")


def test_ranks_that_fail_after_a_signal_are_not_started_again(run):
    assert run(f"{WAITS}\nsys.exit(130)", signals=(signal.SIGINT,), restarts=2) == (130, "")


def test_ranks_that_do_not_end_after_a_signal_are_killed_after_the_time_to_save(run):
    status, said = run(f"{WAITS}\ntime.sleep(60)", signals=(signal.SIGTERM,), patience=1.0)
    assert status == 137, "not 75: nothing was saved"
    killed, why = said.splitlines()
    assert killed == "the ranks did not exit in time after the signal (run.timeout); killing them"
    assert why == "rank 0 was killed by SIGKILL; the newest checkpoint is runs/a/checkpoints/step_00000004"


@pytest.mark.parametrize(
    "words, message",
    [
        ("--nproc 0", "'0' is not a positive integer"),
        ("--nproc all", "'all' is not a positive integer"),
        ("--nproc 4:2", "'4:2' is not MIN:MAX, because 4 exceeds 2"),
        ("--nproc 1:2 --return_after soon", "--return_after soon is not a duration"),
        (
            "--nproc 1 --nnodes 1:2 --rdzv_endpoint node0:29500 --node_rank 0",
            "--node_rank is not supported with --nnodes 1:2",
        ),
        (
            "--nproc 1:2 --nnodes 2 --rdzv_endpoint node0:29500 --node_rank 0",
            "--node_rank is not supported with --nproc 1:2",
        ),
        ("--nnodes 2", "require --nproc"),
        ("--nproc 2 --nnodes 2", "--nnodes 2 requires --rdzv_endpoint HOST:PORT, got none"),
        (
            "--nproc 2 --nnodes 2 --rdzv_endpoint node0:29500 --node_rank 2",
            "--node_rank must be between 0 and 1 for --nnodes 2, got 2",
        ),
        ("--nproc 2 --node_rank 0", "require more than one node"),
        ("--nproc 2 --max_restarts -1", "--max_restarts must be non-negative, got -1"),
        ("--nproc 2 --tp 3 --data.train nothing --model.vocab_size 96", "parallel.tp = 3"),
    ],
)
def test_a_wrong_option_is_one_message_before_anything_is_started(words, message, capfd):
    assert wanted(words.split())
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    said = capfd.readouterr().err
    lines = 3 if said.startswith("There are 2 mistakes") else 1
    assert caught.value.code == 2 and message in said and said.count("\n") == lines, said


def test_a_rank_of_a_launcher_starts_no_others(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as caught:
        main(["--nproc", "2"])
    assert caught.value.code == 2 and "--nproc cannot be used under torchrun" in capfd.readouterr().err


def test_copies_in_memory_are_saved_in_the_run(monkeypatch, tmp_path):
    settings, memory = [], tmp_path / "memory"
    monkeypatch.setattr("megalite.launch.agent.launch", lambda options, command: settings.append(options) or 0)
    words = f"--nproc 2 --dp 2 --data.train {write_tokens(tmp_path, 96)} --run.name a --run.dir {tmp_path}"
    assert main([*words.split(), "--model.vocab_size", "96"]) == 0
    (memory / "step_00000004").mkdir(parents=True)
    (memory / "step_00000004" / "manifest.json").write_text("damaged")
    (line,) = settings[0].save_copies(memory)
    assert line.endswith(f"--checkpoint.load {tmp_path / 'a' / 'checkpoints' / 'step_00000004'}")
