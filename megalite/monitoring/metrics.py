"""Metrics of a run in metrics.jsonl, and optionally in trackers.

Only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config import run_files
from megalite.config.load import write_config
from megalite.config.schema import Config
from megalite.model.cost.flops import model_flops_per_token
from megalite.monitoring.trackers import selection
from megalite.monitoring.trackers.recipient import Recipient
from megalite.system.files import replacing, write_synced
from megalite.system.messages import say

if TYPE_CHECKING:
    import torch

MEMBER = "epoch/"
"""Prefix of the keys for the epochs of the members of a blend."""
SOURCE, VALIDATED = "loss/", "val_loss/"
"""Prefixes of the keys for training losses by member of a blend, and for validation losses by set."""
REWARDS, LOGPS = "rewards/", "logps/"
"""Prefixes of the keys of objectives over preferences: rewards and log-probabilities of completions."""
HELD_OUT = "val_"
"""Prefix of the keys of an objective in a validation."""
SATURATED, FLUSHED, ROUNDING = "fp8_saturated", "fp8_flushed", "fp8_error"
"""Keys of fp8 matmuls: KEY/OPERAND is the mean of all matrices, KEY_by_layer/MATRIX.OPERAND lists layers."""
BY_LAYER = "_by_layer"


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step, a line of metrics.jsonl."""

    step: int  # 1-based
    loss: float  # mean over every valid token of the global batch
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # valid tokens of the global batch
    step_time_s: float
    tokens_per_second: float  # over all ranks, masked tokens included
    tflops_per_gpu: float  # model FLOPs
    mfu: float | None  # fraction of the device's peak, if known
    # measured: fraction of the pipeline's time in which its ranks do not compute; on a GPU only if requested
    bubble_fraction: float | None
    peak_memory_bytes: int
    loss_scale: float
    skipped: bool  # weights and optimizer state were not updated


def throughput(
    config: Config, seconds: float, ranks: int, device_name: str, batch: int | None = None
) -> dict[str, Any]:
    """Compute the throughput of a step, under its keys in metrics.jsonl.

    Masked tokens are included, because they are computed.

    Args:
        seconds: duration of the step.
        batch: number of samples; default: train.global_batch_size.
    """
    from megalite.planner.api import peak_flops  # not at the start of every command that reads metrics

    tokens_per_second = (batch or config.train.global_batch_size) * config.data.sequence_length / seconds
    per_rank = (
        tokens_per_second
        * model_flops_per_token(config.model, config.data.sequence_length, config.lora)
        / ranks
    )
    peak = peak_flops(device_name, config.train.precision)
    return {
        "tokens_per_second": tokens_per_second,
        "tflops_per_gpu": per_rank / 1e12,
        "mfu": None if peak is None else per_rank / peak,
    }


class MetricsWriter(ExitStack):
    """Writer of one JSON object per line, with floats in full precision. Lines are written unbuffered.

    A full disk does not end the run: lines that could not be written are kept, and written before the next
    one.

    Args:
        run_dir: the run directory, which is created if it does not exist.
        resume_step: lines of later steps are removed. They are left by a run that got further than its
            checkpoint.
        config: selects the trackers, which store it.
    """

    def __init__(self, run_dir: Path, resume_step: int = 0, config: Config | None = None):
        super().__init__()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path, self._config = run_dir / run_files.METRICS, config
        self._recipients = selection.open_recipients(config, run_dir, resume_step) if config else []
        for recipient in self._recipients:
            self.push(partial(_close, recipient))
        self._start_file(resume_step)

    def rewind(self, step: int) -> None:
        """Continue after a step.

        Lines of later steps are removed from metrics.jsonl, and TensorBoard no longer shows them; other
        trackers keep what they have.
        """
        self._start_file(step)
        for recipient in self._recipients:
            recipient.rewind(step)

    def _start_file(self, step: int) -> None:
        cut_after(self._path, step)
        self._file = self.enter_context(open(self._path, "ab", buffering=0))  # noqa: SIM115 (the stack closes it)
        self._unwritten, self._refused = b"", False

    def step(self, metrics: StepMetrics, numbers: Mapping[str, Any] | None = None) -> None:
        """Write the line of a step.

        Args:
            numbers: further keys of the line.
        """
        self._write(asdict(metrics) | dict(numbers or {}))

    def validation(
        self,
        step: int,
        loss: float,
        by_set: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write the line of a validation.

        Args:
            by_set: the losses of validation sets by name.
            metrics: those of the objective, whose names get the prefix val_.
        """
        self._write(
            {"step": step, "val_loss": loss}
            | {f"{VALIDATED}{name}": value for name, value in (by_set or {}).items()}
            | {f"{HELD_OUT}{name}": value for name, value in (metrics or {}).items()}
        )

    def _write(self, record: dict[str, Any]) -> None:
        """Write a record. Numbers that are not finite become null, because JSON does not support them."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._append(json.dumps(finite, allow_nan=False) + "\n")
        scalars = {
            name: float(value)
            for name, value in record.items()
            if value is not None and not isinstance(value, list) and name != "step"
        }
        for recipient in self._recipients:
            recipient.log(scalars, record["step"])

    def _append(self, line: str) -> None:
        self._unwritten += line.encode()
        try:
            self._restore_directory()
            # a write may be partial before one fails
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._refused = False
        except OSError as error:
            if not self._refused:
                self._refused = True
                say(
                    f"could not write to {self._path}: {error.strerror}. Its lines are kept in memory "
                    "until the file is writable again"
                )

    def _restore_directory(self) -> None:
        """Create the run directory again if it was removed or moved.

        Otherwise writes to the removed file would be lost without an error.
        """
        with suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino:
                return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.enter_context(open(self._path, "ab", buffering=0))  # noqa: SIM115 (the stack closes it)
        if self._config is not None:
            write_config(self._config, self._path.parent)
        say(f"{self._path} was deleted or moved; created it again, without the lines of earlier steps")


def _close(recipient: Recipient, kind: type[BaseException] | None, *_: object) -> None:
    recipient.close(failed=kind is not None)


def cut_after(file: Path, step: int) -> None:
    """Remove the lines of later steps, and the incomplete last line of a killed run.

    The file is replaced atomically.
    """
    if not file.exists():
        return
    with replacing(file) as fresh:
        write_synced(fresh, "".join(line + "\n" for line in lines_up_to(file, step)))


def lines_up_to(file: Path, step: int) -> list[str]:
    """Return the complete lines with a `step` of at most this one. A missing file has none."""
    if not file.exists():
        return []
    return [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if (number := _step_of(line)) is not None and number <= step
    ]


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes.

    On a GPU this is the memory of allocated tensors, on a CPU the resident set including mapped files. On
    Linux VmHWM only covers this program; getrusage, used on other systems, may include the peak of its parent
    process.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
