"""The compute dtype of train.precision = auto: by the device, or by the run that is resumed."""

import ctypes
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.config.rule import is_checkpoint
from megalite.config.schema import Config

AUTO = "auto"
Device = Literal["cuda", "cpu"]
CPU_INFO = Path("/proc/cpuinfo")
# NVIDIA's, which torch loads; a container without GPUs lacks it, although it sees the host's /proc
LIBRARY = "libcuda.so.1"
GPUS = ("/dev/nvidia[0-9]*", "/dev/dxg", "/proc/driver/nvidia/gpus/*")
"""Any of these tells of a GPU: its device, that of Windows under WSL, and what the driver knows before its
devices are made."""
BF16_UNITS = {"x86_64": ("amx_bf16", "avx512_bf16"), "aarch64": ("bf16",)}
"""Architecture → flags in /proc/cpuinfo of processors that compute products in bf16."""


@dataclass(frozen=True)
class PrecisionChoice:
    """What auto stands for in a run.

    Attributes:
        device: None if the resumed run decided.
    """

    precision: str
    device: Device | None
    reason: str

    def describe(self) -> str:
        return f"train.precision = {AUTO} is {self.precision}: {self.reason}"


def chosen(config: Config, device: Device | None = None) -> PrecisionChoice:
    """The precision for a configuration with train.precision = auto.

    Args:
        device: default: that of this machine.
    """
    return _recorded(config) or of_device(device or this_device())


def of_device(device: Device) -> PrecisionChoice:
    """bf16 on a GPU or a CPU with bf16 units, else fp32."""
    if device == "cuda":
        return PrecisionChoice("bf16", device, "the run is on a GPU")
    if units := bf16_units():
        return PrecisionChoice("bf16", device, f"this CPU has bf16 units ({', '.join(units)})")
    return PrecisionChoice("fp32", device, "this CPU has no bf16 units")


def bf16_units() -> list[str]:
    """The flags of this CPU that say that it computes products in bf16."""
    known = BF16_UNITS.get(platform.machine(), ())
    with suppress(OSError):
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return [flag for flag in known if flag in flags.split()]
    return []


def this_device() -> Device:
    """The device that torch will choose on this machine. What torch itself sees counts if it is imported
    already."""
    if (torch := sys.modules.get("torch")) is not None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    with suppress(PackageNotFoundError):
        if visible and not visible.startswith("-") and "+cpu" not in version("torch"):
            return "cuda" if _has_gpu() else "cpu"
    return "cpu"


def _has_gpu() -> bool:
    """Whether NVIDIA's library and a GPU are there. The library is not initialized: it reads environment
    variables that may yet be set."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return any(glob(pattern) for pattern in GPUS)


def _recorded(config: Config) -> PrecisionChoice | None:
    """The precision of the run that this one resumes, by its stored configuration; None if it starts at step
    0."""
    load = config.checkpoint.load
    start = config.run.directory if load == "auto" else Path(load)
    if load == "none" or not is_checkpoint(str(start)):
        return None
    place = start.absolute()
    # a checkpoint of a run, or all of them
    in_run = next((path for path in (place, place.parent) if path.name == run_files.CHECKPOINTS), None)
    directory = start if in_run is None else in_run.parent
    with suppress(OSError, ConfigError, KeyError, TypeError):
        precision = _stored(directory / run_files.CONFIG)
        if isinstance(precision, str) and precision != AUTO:
            return PrecisionChoice(precision, None, f"the resumed run {directory} has it")
    return None


def _stored(file: Path) -> object:
    import yaml

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))["train"]["precision"]
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
