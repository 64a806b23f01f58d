"""The best validation loss of a run: the checkpoint that is kept for it, and the end of a run whose loss no
longer falls.

What is known is part of the checkpoints (`Trainer.loop_state`): a resumed run counts on, and a rollback
forgets what came after. A run that resumes with another validation starts anew: its losses cannot be
compared with the earlier ones. All ranks have the same losses, so each decides alike without communication.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from megalite.checkpoint import directories, step_name, step_number
from megalite.config import run_files
from megalite.config.schema import Config

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer
    from megalite.training.validation import Losses

KEY = "best"
FOLLOWED = "followed"  # what the losses are of
# the best before the last best, which counts again if the last one cannot be saved; not part of checkpoints
BEFORE = "before"


def note(trainer: Trainer, losses: Losses) -> bool:
    """Take in the losses of a validation after the last step. Returns whether it is the best so far."""
    forget_failed(trainer)
    train, loss = trainer.config.train, losses.of(trainer.config.validation.monitor)
    state = {"loss": None, "step": 0, "improved": None, "waited": 0, **trainer.loop_state.get(KEY, {})}
    value = loss if isfinite(loss) else inf
    best = value < _number(state["loss"])
    if best:
        state |= {
            "loss": value,
            "step": trainer.step_done,
            BEFORE: {"loss": state["loss"], "step": state["step"]},
        }
    if value < _number(state["improved"]) - train.early_stopping_threshold:
        state |= {"improved": value, "waited": 0}
    else:
        state["waited"] += 1
    trainer.loop_state[KEY] = state
    return best


def forget_failed(trainer: Trainer) -> None:
    """If the best checkpoint could not be saved, let the loss before it be the best again. Waits for its
    save, so that all ranks know the same."""
    if not trainer.config.checkpoint.keep_best:
        return
    if trainer.saver.saving_best:
        trainer.saver.wait()
    state = trainer.loop_state.get(KEY, {})
    if trainer.saver.best_failed and BEFORE in state:
        trainer.loop_state[KEY] = state | state[BEFORE]
    trainer.saver.best_failed = False


def _number(value: float | None) -> float:
    return inf if value is None else value


def state_to_save(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint keeps of the loop's state. Without a validation, what it is of stays as it was."""
    forget_failed(trainer)
    state, followed = dict(trainer.loop_state), _followed(trainer)
    if KEY in state:
        state[KEY] = {name: value for name, value in state[KEY].items() if name != BEFORE}
    return state if followed is None else {**state, FOLLOWED: followed}


def resume_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Take over a checkpoint's state of the loop, without losses that those of this run cannot be compared
    with."""
    now = _followed(trainer)
    trainer.loop_state, trainer.saver.best_failed = dict(state), False
    if KEY in state and now is not None and state.get(FOLLOWED, now) != now:
        trainer.loop_state = {}
        trainer.notes.append(
            "the validation has changed since the checkpoint: its best loss does not count any longer"
        )


def _followed(trainer: Trainer) -> dict[str, Any] | None:
    """What the loss that is followed is of, as plain data; None: there is no validation. Names and places of
    files do not count."""
    data, config = trainer.validation_data, trainer.config
    if data is None:
        return None
    monitor, batches = config.validation.monitor, config.validation.batches
    sets = list(data.sets.values()) if monitor is None else [data.sets[monitor]]
    most = inf if batches is None else batches * config.train.global_batch_size
    return {
        "sets": [dataset.fingerprint for dataset in sets],
        "samples": [min(dataset.samples_per_epoch, most) for dataset in sets],
        "ema": config.validation.ema,
        "eod_mask_loss": config.data.eod_mask_loss,
        "reset_positions": config.data.reset_positions,
    }


def stopped_early(config: Config, loop_state: dict[str, Any]) -> str | None:
    """Why the run ends before its last step; None: it goes on."""
    patience, state = config.train.early_stopping_patience, loop_state.get(KEY, {})
    if patience is None or state.get("waited", 0) < patience:
        return None
    best = (
        "none was finite"
        if state["loss"] is None
        else f"the best is {state['loss']:.4f}, after step {state['step']}"
    )
    times = f"{state['waited']} validation{'s' if state['waited'] > 1 else ''}"
    return f"no improvement in {times} (train.early_stopping_patience = {patience}): {best}"


def mark_again(trainer: Trainer) -> None:
    """After a resume or a rollback, on rank 0: let `checkpoints/best` name the best of what the run now
    knows, or nothing."""
    checkpoints = trainer.run_dir / run_files.CHECKPOINTS
    wanted, marked = (
        checkpoints / step_name(trainer.loop_state.get(KEY, {}).get("step", 0)),
        directories.best(checkpoints),
    )
    if wanted.is_dir():
        directories.mark_best(wanted)
    elif (
        marked is not None and (step_number(marked.name) or 0) > trainer.step_done
    ):  # else its save has failed, and `marked` is the next best
        (checkpoints / run_files.BEST).unlink()
