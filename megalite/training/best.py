"""Best validation loss of a run, used to keep the best checkpoint and for early stopping.

The state is stored in checkpoints (`Trainer.loop_state`): a resumed run continues it, and a rollback discards
later results. If a run resumes with a different validation, the state is reset, because the losses cannot be
compared. All ranks have the same losses, so they make the same decision without communication.
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
FOLLOWED = "followed"  # description of the loss
# the best before the last best, which counts again if the last one cannot be saved; not part of checkpoints
BEFORE = "before"


def note(trainer: Trainer, losses: Losses) -> bool:
    """Record the losses of a validation after the last step. Return whether it is the best so far."""
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
    """Restore the previous best loss if the best checkpoint could not be saved.

    Waits for that save, so that all ranks have the same result.
    """
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
    """Return the loop state for a checkpoint.

    A run without validation keeps the description of the previous validation.
    """
    forget_failed(trainer)
    state, followed = dict(trainer.loop_state), _followed(trainer)
    if KEY in state:
        state[KEY] = {name: value for name, value in state[KEY].items() if name != BEFORE}
    return state if followed is None else {**state, FOLLOWED: followed}


def resume_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load the loop state of a checkpoint, without losses that cannot be compared with those of this run."""
    now = _followed(trainer)
    trainer.loop_state, trainer.saver.best_failed = dict(state), False
    if KEY in state and now is not None and state.get(FOLLOWED, now) != now:
        trainer.loop_state = {}
        trainer.notes.append(
            "the validation settings have changed since the checkpoint: discarding its best loss"
        )


def _followed(trainer: Trainer) -> dict[str, Any] | None:
    """Return a description of the loss that is tracked as plain data, or None without validation.

    Names and paths of files are not included.
    """
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
    """Return the reason to end the run early, or None if it continues."""
    patience, state = config.train.early_stopping_patience, loop_state.get(KEY, {})
    if patience is None or state.get("waited", 0) < patience:
        return None
    best = (
        "no validation loss was finite"
        if state["loss"] is None
        else f"the best loss is {state['loss']:.4f}, from step {state['step']}"
    )
    times = f"{state['waited']} validation{'s' if state['waited'] > 1 else ''}"
    return f"no improvement in {times} (train.early_stopping_patience={patience}); {best}"


def mark_again(trainer: Trainer) -> None:
    """Update the link `checkpoints/best` on rank 0 after a resume or a rollback, or remove it."""
    checkpoints = trainer.run_dir / run_files.CHECKPOINTS
    wanted, marked = (
        checkpoints / step_name(trainer.loop_state.get(KEY, {}).get("step", 0)),
        directories.best(checkpoints),
    )
    if wanted.is_dir():
        directories.mark_best(wanted)
    elif (
        marked is not None and (step_number(marked.name) or 0) > trainer.step_done
    ):  # otherwise its save has failed, and `marked` is the next best
        (checkpoints / run_files.BEST).unlink()
