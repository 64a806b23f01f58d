"""Jobs of one run as a scheduler starts them: two at once, one after a kill, and one that has nothing to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megalite_kernels import fp8_matmul

from megalite.commands import train
from megalite.commands.train import check_run
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.precision import PrecisionChoice, of_device
from megalite.config.schema import Config
from megalite.launch import process as launch_process
from megalite.launch.exit_status import ExitStatus
from megalite.mesh.mesh import Layout, Mesh
from megalite.training.watchdog import Watchdog
from tests.structure.sources import ROOT
from tests.support.configs import write_tokens

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def start(run: Path, prefix: str, *options: str) -> subprocess.Popen[str]:
    shape = [each for name, value in SHAPE.items() for each in (f"--model.{name}", str(value))]
    data = [
        "--data.train",
        prefix,
        "--data.sequence_length",
        "16",
        "--train.global_batch_size",
        "4",
        "--train.steps",
        "100000",
    ]
    arguments = [
        "--run.dir",
        str(run.parent),
        "--run.name",
        run.name,
        *shape,
        *data,
        "--optimizer.decay",
        "constant",
        *options,
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "megalite", "train", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_jobs_in_one_directory(tmp_path):
    """The second is refused with the first's name and changes nothing; after a kill of the first it takes over and
    continues."""
    run, prefix = tmp_path / "run", write_tokens(tmp_path, 96)
    first = start(run, prefix, "--checkpoint.interval", "5", "--checkpoint.keep", "2")
    try:
        deadline = time.monotonic() + 300
        while not (run / "checkpoints" / "latest").exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        second = start(run, prefix, "--checkpoint.load", "none", "--run.overwrite", "true")
        output, _ = second.communicate(timeout=300)
        assert second.returncode == 73 and output.count("\n") == 1, output
        assert f"locked by process {first.pid} on {os.uname().nodename}" in output
        assert first.poll() is None and (run / "checkpoints" / "latest").exists()
    finally:
        first.kill()
        first.communicate()
    newest = int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    third = start(run, prefix, "--train.steps", str(newest + 2), "--optimizer.lr", "1e-4")
    output, _ = third.communicate(timeout=300)
    assert third.returncode == 0, output
    assert f"took over the lock of process {first.pid} on" in output and f"resumed after step {newest}" in output
    assert "changed since the checkpoint" in output and "optimizer.lr" in output
    content = json.loads((run / "summary.json").read_text())
    assert (content["state"], content["step"], content["exit_status"]) == ("done", newest + 2, 0)
    assert not (run / "lock").exists()


def test_what_auto_has_become_is_a_line_and_follows_the_device_that_torch_sees(tmp_path, monkeypatch):
    """A driver without a GPU that torch can use: the precision is that of the CPU, not the expected one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = {"data": {"train": write_tokens(tmp_path, 96), "sequence_length": 16}, "run": {"dir": str(tmp_path)}}
    config = from_dict(
        {"model": {**SHAPE, "vocab_size": 96}, "parallel": {"dp": 1}, "train": {"precision": "fp16"}, **options}
    )
    _, _, remarks = check_run(config, PrecisionChoice("fp16", "cuda", "the run is on a GPU"))
    cpu = of_device("cpu")
    assert config.train.precision == cpu.precision and remarks[0] == cpu.describe()
    config.train.precision = "fp16"
    resumed = PrecisionChoice("fp16", None, "the resumed run has it")
    assert check_run(config, resumed)[2][0] == resumed.describe() and config.train.precision == "fp16"
    assert not any("auto" in line for line in check_run(config)[2])


@pytest.mark.parametrize(
    "architecture, fp8, ways",
    [("sm_90", "mxfp8", "Set train.fp8 to block or none, or"), ("", "block", "Set train.fp8 to none, or")],
)
def test_fp8_without_its_tensor_cores_is_rejected_unless_it_is_asked_to_be_emulated(
    architecture, fp8, ways, tmp_path, monkeypatch
):
    """Before any rank meets another."""
    monkeypatch.setattr(fp8_matmul, "fp8_architecture", lambda device: architecture)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(launch_process, "choose_device", lambda: torch.device("cuda"))
    options = {"data": {"train": write_tokens(tmp_path, 96), "sequence_length": 16}, "run": {"dir": str(tmp_path)}}
    options |= {"parallel": {"dp": 1}, "train": {"precision": "bf16", "fp8": fp8}}
    config = from_dict({"model": {**SHAPE, "vocab_size": 96}, **options})

    def exit_with(message):
        raise SystemExit(message)

    monkeypatch.setattr(train, "exit_with", exit_with)
    with pytest.raises(SystemExit) as ended:
        check_run(config)
    message = str(ended.value)
    assert message.startswith(f"train.fp8 = {fp8} requires the tensor cores of") and "A GPU" in message
    assert ways in message and "train.kernels to torch" in message
    config.train.kernels = "torch"
    check_run(config)


def test_the_watchdog_covers_the_start(monkeypatch):
    """Ranks that await the load of another one have no limit but what it tells of that rank."""
    order = []

    class Ended(Exception):
        pass

    def trainer(*args):
        order.append("Trainer")
        raise ConfigError("a checkpoint that must not be continued")

    def end_run(error, config, device, mesh, job, status):
        order.append(status)
        raise Ended

    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setattr(train, "load", lambda world_size: SimpleNamespace(config=Config(), choice=None))
    monkeypatch.setattr(train, "set_variables", lambda network: [])
    monkeypatch.setattr(train, "check_run", lambda config, choice: (torch.device("cpu"), None, []))
    monkeypatch.setattr(
        train, "start", lambda config, device: (SimpleNamespace(restarted=False), None, Mesh(Layout()), [])
    )
    monkeypatch.setattr(train, "end_run", end_run)
    monkeypatch.setattr("megalite.training.trainer.Trainer", trainer)
    monkeypatch.setattr(Watchdog, "__enter__", lambda self: order.append("watched"))
    monkeypatch.setattr(Watchdog, "__exit__", lambda self, kind, error, trace: order.append(kind))
    with pytest.raises(Ended):
        train.main()
    assert order == ["watched", "Trainer", ConfigError, ExitStatus.CONFIGURATION]
