"""Whole runs through torchrun: a signal to one worker, the time limit, resuming, and a configuration that cannot
run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from tests.distributed.test_faults import fitted
from tests.support.configs import write_tokens
from tests.support.jobs_training import resume

ROOT = Path(__file__).parents[2]
TIMEOUT = 300.0  # seconds: far more than a loaded machine needs


def command(run: Path, prefix: str, *arguments: str) -> list[str]:
    options = {
        **{"run.dir": run.parent, "run.name": run.name, "data.train": prefix, "data.sequence_length": 16},
        **{"model.hidden_size": 32, "model.intermediate_size": 48, "model.num_hidden_layers": 2},
        **{"train.steps": 100_000, "train.global_batch_size": 4, "train.micro_batch_size": 2},
    }
    values = [part for option, value in options.items() for part in (f"--{option}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain.py"]
    return [sys.executable, *launcher, *values, "--dp", "2", *arguments]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, output


def steps_of(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def worker(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank: a child of torchrun that has this RANK."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError(f"torchrun has no worker of rank {rank} among {children}")


def wait_for_steps(run: Path, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while len(steps_of(run)) < count:
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.05)


def checkpoint_step(run: Path) -> int:
    latest = (run / "checkpoints" / "latest").read_text().strip()
    return json.loads((run / "checkpoints" / latest / "manifest.json").read_text())["state"]["step"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc")
def test_a_signal_to_one_worker_saves_and_ends_all_and_the_run_resumes_until_its_time_limit(tmp_path):
    run, prefix = tmp_path / "run", write_tokens(tmp_path, 96)
    process = start(command(run, prefix))
    wait_for_steps(run, process, 3)
    os.kill(worker(process, 1), signal.SIGTERM)  # not rank 0: it has to tell the other
    status, output = finish(process)
    assert status == 0, output
    stopped = checkpoint_step(run)
    assert steps_of(run) == list(range(1, stopped + 1))
    assert f"stopping after step {stopped}: requested by another rank" in output

    status, output = finish(start(command(run, prefix, "--checkpoint.load", "auto", "--train.stop_after", "1s")))
    assert status == 0, output
    assert f"resumed after step {stopped}, at sample {4 * stopped}" in output
    again = checkpoint_step(run)
    assert again > stopped and f"stopping after step {again}" in output
    assert steps_of(run) == list(range(1, again + 1))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc")
def test_a_rank_that_is_gone_is_named_by_all_others(tmp_path):
    """Its connections close, or its process is seen to be gone. test_lost_ranks.py stops ranks and lets them hang, too,
    over dp and pp."""
    run, prefix = tmp_path / "run", write_tokens(tmp_path, 96)
    arguments = command(run, prefix, "--run.timeout", "60s", "--dp", "1", "--tp", "4")
    arguments[arguments.index("--nproc-per-node") + 1] = "4"
    process = start(arguments)
    wait_for_steps(run, process, 3)
    gone, *others = (worker(process, rank) for rank in (1, 0, 2, 3))
    os.kill(gone, signal.SIGKILL)
    deadline = time.monotonic() + TIMEOUT
    while any(Path(f"/proc/{other}").exists() for other in others) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{other}").exists() for other in others), "a rank still waits"
    status, output = finish(process)
    assert status != 0
    for rank in (0, 2, 3):
        # its own communication fails, or it learns from another rank that the run has lost one
        fails = r"\w+ over \w+ failed, because rank \d .*|ends, in step .*, awaiting .*"
        named = rf"^rank {rank}: (?:{fails})\(rank 1 was lost first: its process \w+ .*\)$"
        assert re.search(named, output, re.MULTILINE), output
    assert str(ROOT / "megalite") not in output, "no frame of ours is shown"


def uninterrupted(run: Path, ranks, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final state of the same run without faults."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"]["name"] += "-uninterrupted"
    config["faults"]["inject"], config["parallel"]["dp"] = None, world
    tensors = ranks.run(world, fitted, config)[0]["tensors"]
    return losses_of(run.with_name(config["run"]["name"])), tensors


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_torchrun_restarts_a_killed_run_which_ends_as_if_nothing_had_been(tmp_path, ranks):
    run, prefix = tmp_path / "run", write_tokens(tmp_path, 96)
    options = ["--faults", "kill:rank=1,step=6", "--checkpoint.interval", "2", "--train.steps", "9"]
    options += ["--train.fp32_matmul", "onednn"]  # as the pool of ranks, so that the losses can be equal
    arguments = command(run, prefix, *options)
    arguments[arguments.index("pretrain.py") : 0] = ["--max-restarts", "2"]
    status, output = finish(start(arguments))
    assert status == 0 and output.count("injected kill") == 1, output
    assert "resumed after step 4, at sample 16" in output
    losses, tensors = uninterrupted(run, ranks, 2)
    assert losses_of(run) == losses
    config = yaml.safe_load((run / "config.yaml").read_text())
    last = ranks.run(2, resume, config, 0)[0]
    assert last["place"]["step"] == 9
    assert all(torch.equal(value, tensors[name]) for name, value in last["started"].items())


def test_torchrun_and_the_run_name_the_rank_that_was_killed(tmp_path):
    run, prefix = tmp_path / "run", write_tokens(tmp_path, 96)
    options = ["--checkpoint.interval", "4", "--train.steps", "9", "--train.micro_batch_size", "1"]
    arguments = command(run, prefix, *options, "--faults", "kill:rank=3,step=6", "--dp", "4")
    arguments[arguments.index("--nproc-per-node") + 1] = "4"
    status, output = finish(start(arguments))
    assert status != 0 and checkpoint_step(run) == 4, output
    assert re.search(r"Root Cause.*\n.*\n.*\n.*\n.*rank +: 3 .*\n.*exitcode +: -9", output)
    lost = "rank 3 was lost first: its process has ended"
    assert (run / "crash.md").read_text().partition("```\n")[2].startswith(lost)
    assert json.loads((run / "summary.json").read_text())["reason"].startswith(lost)


def test_a_wrong_configuration_is_one_message(tmp_path):
    """torchrun turns the workers' exit status 2 into 1 and prints its own report, which names one rank and ends with
    our message."""
    status, output = finish(start(command(tmp_path / "run", write_tokens(tmp_path, 96), "--tp", "3", "--dp", "1")))
    assert status == 1 and output.count("parallel.tp = 3") == 2, output
    assert "pretrain.py FAILED" in output and "exitcode  : 2" in output, output
    assert "parallel.tp = 3 does not divide" in output.splitlines()[-2] and set(output.splitlines()[-1]) == {"="}, (
        output
    )
    assert str(ROOT / "megalite") not in output, "no frame of ours is shown"


def test_a_checkpoint_that_can_not_be_written_is_one_message(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("not a directory")
    arguments = command(run, write_tokens(tmp_path, 96), "--dp", "1", "--train.steps", "2")
    status, output = finish(start([sys.executable, *arguments[6:]]))
    assert status == 1 and "Traceback" not in output, output
    assert str(run / "checkpoints") in output.splitlines()[-1], output
