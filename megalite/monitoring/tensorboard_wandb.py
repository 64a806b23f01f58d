"""Optional recipients of metrics, TensorBoard and Weights & Biases. Their errors do not end a run."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Protocol

from megalite.config import run_files
from megalite.config.load import to_dict
from megalite.config.schema import Config
from megalite.config.sections.logging import WANDB_PROJECT
from megalite.system.messages import say

# from the first failure until the next attempt; doubled by each further one, since an attempt may take as
# long
RETRY_S = 60.0


class Client(Protocol):
    """Connection of a library to the service or files that store metrics."""

    def log(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Recipient:
    """Recipient that passes metrics to a client.

    If the client fails, a line is printed, its metrics are dropped, and it is opened again later.

    Args:
        name: name in messages.
        open_client: opens the client to continue after a step.
        rewinds: whether a client can be opened again at an earlier step.
    """

    def __init__(self, name: str, open_client: Callable[[int], Client], step: int, rewinds: bool = True):
        self._name, self._open = name, open_client
        self._client: Client | None = None
        self._retry_at, self._pause = 0.0, RETRY_S
        self._rewinds = rewinds
        self._guard(lambda: self._reopen(step))

    def rewind(self, step: int) -> None:
        """Continue after an earlier step, if the client supports it."""
        if self._rewinds:
            self.close()
            self._guard(lambda: self._reopen(step))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        if self._client is None and monotonic() >= self._retry_at:
            self._guard(lambda: self._reopen(step - 1))
        if (client := self._client) is not None:
            self._guard(lambda: client.log(scalars, step))

    def close(self) -> None:
        if (client := self._client) is not None:
            self._guard(client.close)
        self._client = None

    def _reopen(self, step: int) -> None:
        self._client = self._open(step)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # of any type, because errors of another library must not end a run
            reason = str(error).split("\n")[0] or type(error).__name__
            say(f"{self._name} is disabled for the next {self._pause:.0f} s: {reason}")
            self._client, self._retry_at, self._pause = None, monotonic() + self._pause, 2 * self._pause


class TensorBoard:
    """Client that writes a directory of event files, and hides steps after the one it continues from."""

    def __init__(self, directory: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        _silence_threads_of("tensorboard")
        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _silence_threads_of(package: str) -> None:
    """Suppress tracebacks printed by threads of a package.

    Its next call raises the same error, which `Recipient` reports in one line.
    """
    usual = threading.excepthook

    def report(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith(package):
            usual(failed)

    threading.excepthook = report


class WeightsAndBiases:
    """Client of a run on Weights & Biases. A resumed run keeps its identifier, stored in RUN_DIR/wandb_id."""

    def __init__(self, run_dir: Path, step: int, config: Config, identity: str):
        import wandb

        options = config.logging
        project = (
            options.wandb
            if isinstance(options.wandb, str)
            else os.environ.get("WANDB_PROJECT") or WANDB_PROJECT
        )
        self._run = wandb.init(
            project=project,
            entity=options.wandb_entity,
            group=options.wandb_group,
            tags=options.wandb_tags,
            name=options.wandb_name or run_dir.name,
            mode=options.wandb_mode,
            id=identity,
            dir=str(run_dir),
            config=to_dict(config),
            resume="allow",
        )

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def open_recipients(config: Config, run_dir: Path, step: int) -> list[Recipient]:
    """Return the recipients selected by the options, to continue after a step."""
    recipients = []
    if config.logging.tensorboard:
        requested = config.logging.tensorboard
        directory = Path(requested) if isinstance(requested, str) else run_dir / run_files.TENSORBOARD
        recipients.append(Recipient("TensorBoard", partial(TensorBoard, directory), step))
    if config.logging.wandb:
        recipients.append(
            Recipient("Weights & Biases", _open_wandb(run_dir, step, config), step, rewinds=False)
        )
    return recipients


def _open_wandb(run_dir: Path, resume_step: int, config: Config) -> Callable[[int], WeightsAndBiases]:
    """Return a function that opens the run on Weights & Biases.

    A run that starts at step 0 is created there once.
    """
    fresh = uuid.uuid4().hex

    def open_at(step: int) -> WeightsAndBiases:
        file = run_dir / run_files.WANDB_ID
        if not file.exists() or (resume_step == 0 and file.read_text(encoding="utf-8") != fresh):
            file.write_text(fresh, encoding="utf-8")
        return WeightsAndBiases(run_dir, step, config, file.read_text(encoding="utf-8"))

    return open_at
