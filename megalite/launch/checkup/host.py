"""The host: GPUs, cores and threads, shared memory, limits of processes, its name, and a C compiler."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megalite.launch import machine
from megalite.launch.checkup.finding import Finding

MIB, GIB = 1 << 20, 1 << 30
FILES, PROCESSES = 4096, 4096
COMPILE_S = 30.0
PROGRAM = "#include <Python.h>\nint main(void) { return PY_MAJOR_VERSION - PY_MAJOR_VERSION; }\n"


def gpus() -> Iterator[Finding]:
    devices = machine.gpus()
    if not devices:
        yield Finding("GPUs", "none", "note", "Training runs on the CPU, with gloo.")
        return
    for gpu, count in Counter(devices).items():
        yield Finding(
            "GPUs", f"{count} × {gpu.name}" + (f", {gpu.memory / GIB:.0f} GiB each" if gpu.memory else "")
        )
    yield Finding("driver", machine.driver_version() or "unknown")


def cores() -> Iterator[Finding]:
    total, usable = os.cpu_count() or 1, machine.usable_cores()
    yield Finding(
        "CPU cores", f"{usable} of {total} usable, {machine.memory_bytes() / GIB:.0f} GiB of memory"
    )
    requested = os.environ.get("OMP_NUM_THREADS")
    if requested is None:
        yield Finding(
            "OMP_NUM_THREADS", "not set (a single process uses all cores; each of several uses one)"
        )
    elif not requested.isdecimal() or int(requested) > usable:
        advice = (
            "Too many threads for the cores: OMP_NUM_THREADS times the number of ranks should be at most "
            f"{usable}."
        )
        yield Finding("OMP_NUM_THREADS", requested, "note", advice)
    else:
        yield Finding("OMP_NUM_THREADS", requested)


def shared_memory() -> Iterator[Finding]:
    count = len(machine.gpus())
    needed = (
        machine.SHARED_MEMORY["cuda"] * count
        if count
        else machine.SHARED_MEMORY["cpu"] * machine.usable_cores()
    )
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Finding(
            "/dev/shm",
            "not found",
            "note",
            "Ranks on the same machine communicate through sockets, which is slower.",
        )
        return
    value = f"{usage.free / MIB:,.0f} of {usage.total / MIB:,.0f} MiB free"
    if usage.free < needed:
        yield Finding(
            "/dev/shm",
            value,
            "note",
            f"Ranks may need {needed / MIB:,.0f} MiB. In Docker, use --shm-size 8g or --ipc host.",
        )
    else:
        yield Finding("/dev/shm", value)


def limits() -> Iterator[Finding]:
    yield _limit(
        "open files (ulimit -n)",
        resource.RLIMIT_NOFILE,
        FILES,
        "Run `ulimit -n 65536`: ranks, shards and connections need many open files.",
    )
    yield _limit(
        "processes (ulimit -u)",
        resource.RLIMIT_NPROC,
        PROCESSES,
        "Run `ulimit -u 65536`: every rank starts tens of threads.",
    )
    if Path("/sys/class/infiniband").is_dir():
        advice = (
            "Run `ulimit -l unlimited` (docker run --ulimit memlock=-1): InfiniBand locks its buffers in "
            "memory."
        )
        yield _limit("locked memory (ulimit -l)", resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY, advice)


def _limit(name: str, number: int, least: int, advice: str) -> Finding:
    soft, hard = resource.getrlimit(number)
    if soft == resource.RLIM_INFINITY:
        return Finding(name, "unlimited")
    shown = (
        f"{soft:,}"
        if hard == soft
        else f"{soft:,} (can be raised to {'any number' if hard == resource.RLIM_INFINITY else f'{hard:,}'})"
    )
    if least == resource.RLIM_INFINITY or soft < least:
        return Finding(name, shown, "note", advice)
    return Finding(name, shown)


def host_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError:
        advice = (
            "Gloo and other nodes resolve this name: add it to /etc/hosts or set GLOO_SOCKET_IFNAME to "
            "the interface."
        )
        yield Finding("host name", f"{name} does not resolve to an address", "note", advice)
        return
    yield Finding("host name", f"{name} resolves to {', '.join(addresses)}")


def compiler() -> Iterator[Finding]:
    """Check the C compiler and the Python headers, which Triton needs to launch its first kernel."""
    verdict = "bad" if machine.gpus() else "note"
    words = os.environ.get("CC", "").split() or next(
        ([name] for name in ("gcc", "clang", "cc") if shutil.which(name)), []
    )
    if not words or shutil.which(words[0]) is None:
        advice = "Triton kernels on GPUs need a C compiler. Install gcc (apt-get install gcc) or set CC."
        yield Finding("C compiler", "none", verdict, advice)  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory(prefix="megalite_doctor_") as scratch:
        source = Path(scratch, "test.c")
        source.write_text(PROGRAM, encoding="utf-8")
        command = [
            *words,
            str(source),
            f"-I{sysconfig.get_paths()['include']}",
            "-o",
            str(Path(scratch, "test")),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_S, encoding="utf-8", errors="replace"
            )
            problem = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[0]
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    if problem:
        advice = (
            "Triton kernels on GPUs need a C compiler and the Python headers (apt-get install "
            f"python3-dev): {problem}"
        )
        yield Finding("C compiler", f"{words[0]} failed to compile a test program", verdict, advice)  # type: ignore[arg-type]
    else:
        yield Finding("C compiler", f"{words[0]} compiles with the Python headers")
