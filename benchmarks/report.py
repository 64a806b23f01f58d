"""Starts measured processes, describes the machine they ran on, and writes what they gave. Imports no torch: the processes do."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from megalite import __version__
from megalite.data.indexed import IndexedWriter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class BenchmarkError(RuntimeError):
    """A measured process failed; the message has the end of its output."""


def launch(module: str, spec: dict[str, Any], *, ranks: int = 1, threads: int, limit_s: float = 1800.0) -> dict[str, Any]:
    """Run `python -m module` on `ranks` processes of `threads` threads each and return the result of rank 0."""
    with tempfile.TemporaryDirectory(prefix="megalite_benchmark_") as scratch:
        result = Path(scratch, "result.json")
        Path(scratch, "spec.json").write_text(json.dumps({**spec, "threads": threads, "result": str(result)}))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        with open(Path(scratch, "output"), "w+") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, "-m", module, str(Path(scratch, "spec.json"))], env=environment, stdout=output, stderr=output
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"{module} on {ranks} ranks did not end within {limit_s:.0f} s") from None
            finally:
                _end(process)
            if process.returncode or not result.exists():
                output.seek(0)
                raise BenchmarkError(f"{module} on {ranks} ranks failed:\n{output.read()[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _end(process: subprocess.Popen[Any]) -> None:
    """Leave nothing running: torchrun ends its ranks on SIGTERM, not on SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_random_tokens(directory: Path, vocab_size: int, count: int) -> str:
    """A token file of one document of random tokens; returns its PREFIX."""
    tokens = np.random.default_rng(0).integers(vocab_size, size=count)
    with IndexedWriter(directory / f"random_{vocab_size}", vocab_size) as writer:
        writer.add(tokens, [count])
        writer.finish({"vocab_size": vocab_size})
    return str(directory / f"random_{vocab_size}")


def machine() -> dict[str, Any]:
    """The processor, never the host: figures are compared between machines of a kind."""
    try:
        info = Path("/proc/cpuinfo").read_text()
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        info, memory = "", None
    model = re.search(r"model name\s*:\s*(.+)", info)
    flags = re.search(r"flags\s*:\s*(.+)", info)
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flags and flag in flags[1].split()],
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Of everything whose version a figure depends on."""
    found: dict[str, str | None] = {"python": platform.python_version(), "megalite": __version__, "commit": _commit()}
    for package in ("torch", "numpy", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """The checkout's commit, with + where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(name: str, content: dict[str, Any], directory: Path, machine_name: str | None) -> Path:
    """Write directory/<machine>-name.json, where the machine is named by its processor unless a name is given."""
    where = machine()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{where['cpu']} {where['cores']} cores".lower()).strip("-")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{machine_name or slug}-{name}.json"
    path.write_text(json.dumps({"benchmark": name, "machine": where, "versions": versions(), **content}, indent=1) + "\n")
    return path


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Rows as aligned text. columns: heading → key and format, for example "ms/step": "ms_per_step:.1f"; a missing value is a dash."""
    cells = [list(columns)]
    for row in rows:
        fields = [field.partition(":") for field in columns.values()]
        cells.append(["-" if row.get(key) is None else format(row[key], style) for key, _, style in fields])
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )
