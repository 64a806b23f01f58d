"""Starts measured processes, describes the machine, and writes the results.

This module does not import torch; the processes do.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

from megalite import __version__
from megalite.data.preparation.writer import IndexedWriter
from megalite.system.processes import blocked, marked

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHILD = ("-m", "megalite.launch.rank")  # a process that ends with this one
ROW = "row of results: "  # prefix of the output lines that `stream` parses


class BenchmarkError(RuntimeError):
    """Raised if a measured process fails. The message contains the end of its output."""


def launch(
    module: str, spec: dict[str, Any], *, ranks: int = 1, threads: int, limit_s: float = 1800.0
) -> dict[str, Any]:
    """Run `python -m module` on `ranks` processes with `threads` threads each.

    Return the result of rank 0.
    """
    with tempfile.TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        result = Path(scratch, "result.json")
        Path(scratch, "spec.json").write_text(
            json.dumps({**spec, "threads": threads, "result": str(result)}), encoding="utf-8"
        )
        launcher = (
            [*CHILD, "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            if ranks > 1
            else []
        )
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": search_path(), **marked()}
        command = [sys.executable, *launcher, *CHILD, module, str(Path(scratch, "spec.json"))]
        with open(Path(scratch, "output"), "w+", encoding="utf-8") as output:
            with blocked([signal.SIGINT]):  # the terminal sends it to them as well; this process ends them
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise BenchmarkError(
                    f"{module} on {ranks} ranks did not finish within {limit_s:.0f} s"
                ) from None
            finally:
                _end(process)
            if process.returncode or not result.exists():
                output.seek(0)
                raise BenchmarkError(f"{module} on {ranks} ranks failed:\n{output.read()[-4000:]}")
        content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return content


def stream(
    module: str,
    spec: dict[str, Any],
    hear: Callable[[dict[str, Any]], None],
    *,
    environment: Mapping[str, str],
    limit_s: float,
) -> str | None:
    """Run `python -m module`, and call `hear` with every row of results as it is printed.

    Returns:
        the reason of a failure, or None.
    """
    with (
        tempfile.TemporaryDirectory(prefix="megalite_benchmark_") as scratch,
        open(Path(scratch, "errors"), "w+", encoding="utf-8") as errors,
    ):
        Path(scratch, "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": search_path(), **environment, **marked()}
        command = [sys.executable, *CHILD, module, str(Path(scratch, "spec.json"))]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )

        def kill() -> None:  # also kills the processes in which torch compiles
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = Timer(limit_s, kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(ROW):
                    hear(json.loads(line.removeprefix(ROW)))
            status = process.wait()
        finally:
            late = not timer.is_alive()
            timer.cancel()
            kill()
            process.wait()
        if late:
            return f"did not finish within {limit_s:.0f} s"
        errors.seek(0)
        said = errors.read().strip().splitlines()
        return f"exited with status {status}: {said[-1][:500] if said else 'no message'}" if status else None


def search_path() -> str:
    """Return PYTHONPATH for measured processes."""
    return os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and its ranks. torchrun ends them on SIGTERM, but not on SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_random_tokens(directory: Path, vocab_size: int, count: int, document: int | None = None) -> str:
    """Write a token file of random tokens, and return its PREFIX.

    Args:
        document: tokens of each document, of which the last one is 0; None if all tokens are one document.
    """
    tokens = np.random.default_rng(0).integers(vocab_size, size=count)
    metadata, sizes, name = {"vocab_size": vocab_size}, [count], f"random_{vocab_size}"
    if document is not None:
        tokens = np.maximum(tokens, 1)
        tokens[document - 1 :: document] = 0
        sizes = [document] * (count // document) + [count % document] * (count % document > 0)
        metadata, name = metadata | {"eos": 0}, f"{name}_documents"
    with IndexedWriter(directory / name, vocab_size) as writer:
        writer.add(tokens, sizes)
        writer.finish(metadata)
    return str(directory / name)


def machine() -> dict[str, Any]:
    """Return the processor, but never the host name: figures are compared between machines of one kind."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        info, memory = "", None
    model = re.search(r"model name\s*:\s*(.+)", info)
    flags = re.search(r"flags\s*:\s*(.+)", info)
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": [
            flag
            for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile")
            if flags and flag in flags[1].split()
        ],
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def cores() -> int:
    """Return the number of cores that this process may use, or all if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str | None]:
    """Return the versions of all packages that figures depend on."""
    packages: dict[str, str | None] = {
        "python": platform.python_version(),
        "megalite": __version__,
        "commit": commit(),
    }
    return packages | {package: version(package) for package in ("torch", "numpy", "transformers")}


def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpu() -> str | None:
    """Return the name of the first NVIDIA GPU from the driver, or None."""
    return next(iter(gpus()), None)


def gpus() -> list[str]:
    """Return the names of the visible NVIDIA GPUs from the driver."""
    count, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    names: list[str] = []
    with suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
            for index in range(count.value):
                if (
                    cuda.cuDeviceGet(ctypes.byref(number), index) == 0
                    and cuda.cuDeviceGetName(name, 256, number) == 0
                ):
                    names.append(name.value.decode())
    return names


def commit() -> str | None:
    """Return the commit of the checkout, with + if files differ from it, or None outside of a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, encoding="utf-8", errors="replace"
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(name: str, content: dict[str, Any], directory: Path, machine_name: str | None) -> Path:
    """Write directory/<machine>-name.json; for the machine's name see `default_name`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(name, directory, machine_name or default_name(content.get("device", {}).get("name")))
    path.write_text(
        json.dumps({"benchmark": name, "machine": machine(), "versions": versions(), **content}, indent=1)
        + "\n",
        encoding="utf-8",
    )
    return path


def default_name(device: str | None) -> str:
    """Return the name of the machine in file names: its GPU if that was measured, otherwise its processor."""
    where = machine()
    return slug(device or f"{where['cpu']} {where['cores']} cores")


def path_of(name: str, directory: Path, machine_name: str) -> Path:
    """Return the path of a benchmark's results.

    Args:
        machine_name: see `default_name`.
    """
    return directory / f"{machine_name}-{name}.json"


def slug(name: str) -> str:
    """Convert a name to a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Format rows as aligned text.

    Args:
        columns: heading → key and format, for example "ms/step": "ms_per_step:.1f". Missing values are
            dashes.
    """
    cells = [list(columns)]
    for row in rows:
        fields = [field.partition(":") for field in columns.values()]
        cells.append(["-" if row.get(key) is None else format(row[key], style) for key, _, style in fields])
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )
