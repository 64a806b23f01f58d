"""Two processes with torch: it imports and sees the GPUs, gloo connects them, Triton compiles. What they hang
in is ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.launch import machine
from megalite.launch.checkup.finding import Finding, Verdict
from megalite.launch.local_ranks import package_path
from megalite.system.processes import marked

LIMIT_S = 120.0  # importing torch from a slow file system takes a minute


def findings() -> Iterator[Finding]:
    """Check torch, gloo and Triton in two processes."""
    if machine.version_of("torch") is None:
        return  # a finding of its own
    answers, error, hangs = _run()
    if "torch" not in answers:
        what = f"import did not finish in {LIMIT_S:g} s" if hangs else "import failed"
        yield Finding(
            "torch imports",
            what,
            "bad",
            error or "The file system may be slow. Copy the environment to a local disk.",
        )
        return
    yield from _torch(answers["torch"], answers.get("cuda", ""))
    yield _gloo(answers.get("gloo"), error, hangs)
    if (problem := answers.get("triton")) is not None:
        if problem:
            advice = f"Set train.kernels=torch to train without it. {problem}"
            verdict: Verdict = "bad" if answers["torch"]["devices"] else "note"
            yield Finding("Triton", "failed to compile a kernel", verdict, advice)
        else:
            yield Finding("Triton", "compiles a kernel")


def _torch(results: dict[str, Any], wrong: str) -> Iterator[Finding]:
    build = f"CUDA {results['cuda']}" if results["cuda"] else "CPU build"
    yield Finding(
        "torch imports", f"in {results['seconds']:.1f} s, {build}, sees {len(results['devices'])} GPUs"
    )
    if results["nccl"]:
        yield Finding("NCCL", results["nccl"])
    if wrong:
        yield Finding("GPU computes", wrong, "bad", "Check nvidia-smi and dmesg.")
    there = len(machine.gpus())
    if len(results["devices"]) < there:
        reason = (
            "the driver is too old, or a device is broken (see nvidia-smi)"
            if results["cuda"]
            else "the installed build is CPU-only"
        )
        yield Finding(
            "torch's GPUs",
            f"{len(results['devices'])} of {there}",
            "bad",
            f"Install a CUDA build of torch that supports the driver: {reason}.",
        )


def _gloo(seconds: float | None, error: str, hangs: bool) -> Finding:
    if seconds is not None:
        return Finding("gloo", f"two processes all-reduce in {1e3 * seconds:.1f} ms")
    advice = f"GLOO_SOCKET_IFNAME=lo (or another interface of `ip address`) often helps. {error}".rstrip()
    return Finding(
        "gloo", "two processes failed to connect" + (f" in {LIMIT_S:g} s" if hangs else ""), "bad", advice
    )


def _run() -> tuple[dict[str, Any], str, bool]:
    """Return the answers of both processes by name, the last error line, and whether one was killed."""
    own = {**os.environ, **marked(), "PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        own.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="megalite_doctor_") as scratch:
        command = [sys.executable, "-P", "-m", "megalite.launch.checkup.rank"]
        outputs = [
            tuple(open(Path(scratch, f"{name}{rank}"), "w+b") for name in ("out", "err"))  # noqa: SIM115
            for rank in range(2)
        ]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(Path(scratch, "store"))], env=own, stdout=out, stderr=err
            )
            for rank, (out, err) in enumerate(outputs)
        ]
        hangs = _wait(ranks)
        answers: dict[str, Any] = {}
        lines = []
        for rank, (out, err) in enumerate(outputs):
            answers |= {
                name: value
                for line in _lines(out)
                if line.startswith("{")
                for name, value in json.loads(line).items()
            }
            lines += _lines(err)[-1:] if ranks[rank].returncode else []
    return answers, lines[0] if lines else "", hangs


def _wait(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Wait for both processes and kill them at the limit or if one fails.

    Returns whether one was killed at the limit.
    """
    end = time.monotonic() + LIMIT_S
    try:
        while (
            any(rank.poll() is None for rank in ranks)
            and not any(rank.returncode for rank in ranks)
            and time.monotonic() < end
        ):
            time.sleep(0.05)
    finally:
        running = [rank for rank in ranks if rank.poll() is None]
        hangs = bool(running) and time.monotonic() >= end
        for rank in running:
            rank.kill()
            rank.wait()
    return hangs


def _lines(file: Any) -> list[str]:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace").strip().splitlines()
