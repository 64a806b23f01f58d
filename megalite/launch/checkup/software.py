"""Versions of Python and packages against the ranges that megalite declares, and the extras that are not
installed."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Iterator

from megalite.config.checkout import CHECKOUT
from megalite.launch import machine
from megalite.launch.checkup.finding import Finding

EXTRAS = {
    "data": "preparing data, streams of Parquet, chat templates, the Hugging Face Hub",
    "log": "TensorBoard, Weights & Biases",
    "mlflow": "MLflow",
    "trackio": "Trackio",
    "gpu": "sensors of GPUs",
    "eval": "lm-evaluation-harness",
    "ray": "jobs on Ray clusters",
    "gguf": "GGUF files for llama.cpp",
    "stores": "runs, checkpoints and data in S3, Google Cloud Storage, Azure",
}
SUBMITTERS = ("sbatch", "kubectl", "ray", "sky")
BEYOND_PINS = {"trackio"}
"""Extras that need other versions than constraints.txt has."""
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?\s*(?:>=\s*([\d.]+))?")


def findings() -> Iterator[Finding]:
    """Check Python, the packages that every run needs, and the extras."""
    try:
        metadata = importlib.metadata.metadata("megalite")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "megalite",
            "not installed",
            "note",
            f"The requirements of megalite could not be read. Reinstall it: {install('')}",
        )
        return
    needed = (metadata["Requires-Python"] or "").removeprefix(">=")
    yield _version("Python", platform.python_version(), needed, f"Install Python {needed} or newer.")
    required = importlib.metadata.requires("megalite") or []
    for line in required:
        if "extra ==" not in line:
            yield _package(line)
    for extra, purpose in EXTRAS.items():
        yield _extra(
            extra, purpose, [line for line in required if re.search(rf"extra == ['\"]{extra}['\"]", line)]
        )


def schedulers() -> Iterator[Finding]:
    """Report the programs with which `megalite launch --submit` submits jobs. None is needed to train."""
    present = [program for program in SUBMITTERS if shutil.which(program)]
    yield Finding("launch", ", ".join(present) or f"prints jobs; --submit needs {' or '.join(SUBMITTERS)}")


def install(extra: str) -> str:
    """Return the command that installs megalite with an extra."""
    suffix = f"[{extra}]" if extra else ""
    if CHECKOUT is None:
        return f"pip install 'megalite{suffix}'"
    pins = "" if extra in BEYOND_PINS else "-c constraints.txt "
    return f"pip install {pins}-e '.{suffix}'"


def is_older(version: str, needed: str) -> bool:
    """Return whether a version is older than another, ignoring parts that are not numbers."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in re.match(r"[\d.]*", text)[0].split(".") if part]  # type: ignore[index]

    return numbers(version) < numbers(needed)


def _version(name: str, version: str | None, needed: str, advice: str) -> Finding:
    if version is None:
        return Finding(name, "not installed", "bad", advice)
    if needed and is_older(version, needed):
        return Finding(name, f"{version}, but {needed} or newer is required", "bad", advice)
    return Finding(name, version)


def _package(line: str) -> Finding:
    name, needed = _parsed(line)
    if name == "triton" and platform.system() != "Linux":
        return Finding(name, "not required on this machine")
    finding = _version(name, machine.version_of(name), needed, f"Install it: {install('')}")
    if name == "triton" and finding.verdict == "bad":  # kernels in plain torch take its place
        return Finding(name, finding.value, "note", f"Only required for GPUs. {finding.advice}")
    return finding


def _extra(extra: str, purpose: str, lines: list[str]) -> Finding:
    missing = []
    for name, needed in map(_parsed, lines):
        version = machine.version_of(name)
        if version is None or (needed and is_older(version, needed)):
            missing.append(f"{name} >= {needed}" if version and needed else name)
    if missing:
        return Finding(
            f"extra {extra}", f"without {', '.join(missing)}", "note", f"For {purpose}: {install(extra)}"
        )
    return Finding(f"extra {extra}", purpose)


def _parsed(line: str) -> tuple[str, str]:
    """Return the name of a requirement and its minimum version, or an empty text."""
    match = REQUIREMENT.match(line)
    assert match is not None
    return match[1], match[2] or ""
