"""megalite doctor: what it finds, what it says about what is missing, and that nothing hangs it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import threading
from pathlib import Path

import pytest

from megalite.commands.doctor import main
from megalite.launch import machine
from megalite.launch.checkup import host, pair, software, storage
from megalite.launch.checkup.finding import Finding, bounded


def of(findings: object, name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)  # type: ignore[attr-defined]


def test_this_machine_can_train(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "MOST_BLOCKS", 1)
    assert main(["--dir", str(tmp_path / "runs"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["usable"]
    verdicts = {each["name"]: each["verdict"] for each in content["findings"]}
    assert {verdicts[name] for name in ("Python", "torch", "torch imports", "gloo", "clocks")} == {"good"}
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_the_table_names_what_to_do(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "version_of", lambda name: None if name in ("torch", "wandb") else "99.0")
    assert main(["--quick", "--dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert (
        "not installed" in printed
        and "without wandb" in printed
        and "[log]" in printed
        and "1 problem, and " in printed
    )


def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch):
    pairs = {("2.9.1+cu128", "2.11"): True, ("2.11.0", "2.11"): False, ("3.11.7", "3.11"): False, ("10", "9.5"): False}
    assert {(version, needed): software.is_older(version, needed) for version, needed in pairs} == pairs
    monkeypatch.setattr(machine, "version_of", lambda name: "2.9.1+cu128" if name == "torch" else "99.0")
    assert of(software.findings(), "torch").verdict == "bad"
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    assert of(software.findings(), "triton").verdict == "note", "only GPUs need it"

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", missing)
    assert [finding.verdict for finding in software.findings()] == ["note"]


def test_a_check_that_hangs_or_fails_is_a_finding():
    release = threading.Event()

    def hangs() -> list[Finding]:
        release.wait()
        return []

    def fails() -> list[Finding]:
        raise RuntimeError("no such thing")

    assert [finding.value for finding in bounded("disk", hangs, 0.05)] == ["no answer in 0.05 s"]
    release.set()
    assert [finding.advice for finding in bounded("disk", fails, 5)] == ["RuntimeError: no such thing"]


def test_ranks_that_fail_or_hang_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interpreter = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(interpreter))
    for script, message in (
        ("echo libtorch.so: cannot open >&2; exit 1", "cannot open"),
        ("exec sleep 60", "local disk"),
    ):
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o755)
        (finding,) = pair.findings()
        assert finding.verdict == "bad" and message in finding.advice
        monkeypatch.setattr(pair, "LIMIT_S", 0.2)
    interpreter.write_text(
        '#!/bin/sh\necho \'{"torch": {"cuda": null, "devices": [], "nccl": null, "seconds": 1}}\'\nexec sleep 60\n'
    )
    assert of(pair.findings(), "gloo").verdict == "bad"
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GpuInfo("NVIDIA H200")])
    assert "CUDA build" in of(pair.findings(), "torch's GPUs").advice


def test_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GpuInfo("NVIDIA H200", 141 << 30)] * 8)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: type("Usage", (), {"total": 64 << 20, "free": 64 << 20, "used": 0})
    )
    assert "--shm-size" in of(host.shared_memory(), "/dev/shm").advice
    assert of(host.gpus(), "GPUs").value == "8 × NVIDIA H200, 141 GiB each"
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert of(host.cores(), "OMP_NUM_THREADS").verdict == "note"
    monkeypatch.setattr("resource.getrlimit", lambda number: (256, 1 << 20))
    assert "ulimit -n" in of(host.limits(), "open files (ulimit -n)").advice
    monkeypatch.setenv("CC", "no-such-compiler")
    assert of(host.compiler(), "C compiler").verdict == "bad", "on a GPU"
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    assert "/etc/hosts" in of(host.host_name(), "host name").advice


def test_a_file_system_with_another_clock_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = storage.time.time
    monkeypatch.setattr(storage.time, "time", lambda: now() + 60)
    monkeypatch.setattr(storage, "MOST_BLOCKS", 1)
    assert "differ by 60 s" in of(storage.findings(tmp_path), "clocks").value


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for index in range(3):
        (tmp_path / "gpus" / str(index)).mkdir(parents=True)
        (tmp_path / "gpus" / str(index) / "information").write_text(f"Model: \t\t NVIDIA H20{index}\nIRQ: 1\n")
    counts = {None: 3, "": 0, "-1": 0, "0,2": 2, "GPU-5e,GPU-6f": 2, "7": 0}
    for visible, count in counts.items():
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(machine.gpus()) == count, visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert [gpu.name for gpu in machine.gpus()] == ["NVIDIA H200", "NVIDIA H202"]
    for visible, name in {"0,9,1": "NVIDIA H200", "1,-1,2": "NVIDIA H201"}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.name for gpu in machine.gpus()] == [name], "CUDA stops at the first index that is no device"
