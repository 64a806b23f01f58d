"""Amount of data that a run has read: tokens, and epochs of each member of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.config.rampup import samples_after
from megalite.config.samples import in_words, repeats
from megalite.config.streams import ENDLESS
from megalite.monitoring.metrics import MEMBER, StepMetrics
from megalite.monitoring.observers import Observer

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


class Epochs(Observer):
    """Observer that adds the tokens and epochs read so far to each step.

    Its keys are `tokens_seen`, `epoch` (of the most repeated member) and, for a blend, the epoch of each
    member; streams, whose length is not known, have no epochs. Everything read since the first step of the
    run is counted, including skipped steps and positions without loss.
    """

    def __init__(self, trainer: Trainer):
        members = trainer.train_data.members
        self.trainer, self.members = trainer, [each for each in members if each.samples < ENDLESS]

    def numbers(self, metrics: StepMetrics) -> dict[str, Any]:
        samples = self._samples(metrics.step)
        epochs = {member.name: samples * member.share / member.samples for member in self.members}
        numbers: dict[str, Any] = {"tokens_seen": samples * self.trainer.config.data.sequence_length}
        if epochs:
            numbers["epoch"] = max(epochs.values())
        if self.trainer.config.train.rampup_batch_size is not None:
            numbers["global_batch_size"] = samples - self._samples(metrics.step - 1)
        return numbers | (
            {f"{MEMBER}{name}": epoch for name, epoch in epochs.items()} if len(epochs) > 1 else {}
        )

    def lines(self, metrics: StepMetrics) -> list[str]:
        """Report members that have completed an epoch, after 1, 2, …, 9, 10, 20, … epochs.

        The increasing intervals keep a small member from filling the log.
        """
        config = self.trainer.config
        before, after, all_samples = (
            self._samples(metrics.step - 1),
            self._samples(metrics.step),
            planned_samples(self.trainer),
        )
        lines = []
        for name, size, share in self.members:
            ended = int(after * share // size)
            if (
                ended > int(before * share // size)
                and not str(ended)[1:].strip("0")
                and metrics.step < config.train.steps
            ):
                whole = in_words(all_samples * share / size)
                lines.append(
                    f"{name}: finished epoch {ended} of {whole} after step {metrics.step}, "
                    "starting again from the beginning"
                )
        return lines

    def _samples(self, step: int) -> int:
        """Return the number of samples read by the end of a step. The trainer may be one step ahead."""
        trainer = self.trainer
        return (
            trainer.samples
            + samples_after(trainer.config.train, step)
            - samples_after(trainer.config.train, trainer.step_done)
        )


def repeated(trainer: Trainer) -> list[str]:
    """Return a line for each member of the data that is read more than once."""
    return repeats(
        trainer.train_data.members, planned_samples(trainer), trainer.config.train.global_batch_size
    )


def planned_samples(trainer: Trainer) -> int:
    """Return the number of samples that the run will have read after its last step."""
    train = trainer.config.train
    return trainer.samples + samples_after(train, train.steps) - samples_after(train, trainer.step_done)
