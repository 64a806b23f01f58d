"""The best checkpoint and the early end of a run, by losses that are told in advance."""

from __future__ import annotations

import gc
import json
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite import checkpoint
from megalite.assembly import parts as build
from megalite.checkpoint import inspect
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.rules import check
from megalite.training import best, validation
from megalite.training.fit import fit
from megalite.training.run_directory import claim
from megalite.training.trainer import Trainer
from megalite.training.validation import Losses
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 1, "masked": False, "dropout": 0.0}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def options(prefix: str, directory: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    config = config_of(CASE, prefix, run={"dir": str(directory), "name": "run"})
    config["train"] |= {"steps": 9, "global_batch_size": 2, "micro_batch_size": 2, "watchdog": None}
    config["optimizer"]["decay"] = "constant"
    config |= {
        "checkpoint": {"keep": 1},
        "data": {**config["data"], "validation": 0.1},
        "validation": {"interval": 1, "batches": 1},
    }
    return {section: {**config.get(section, {}), **changes.get(section, {})} for section in {**config, **changes}}


def run(config: dict[str, Any], losses: list[float], monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Train; the validation after step n gives the n-th loss."""
    monkeypatch.setattr(
        validation, "losses", lambda of: Losses(losses[of.step_done - 1], {"one": losses[of.step_done - 1], "two": 1.0})
    )
    return train(config)


def train(config: dict[str, Any]) -> Trainer:
    run_config = from_dict(config)
    trainer = Trainer(run_config, build.make_mesh(run_config))
    try:
        fit(trainer)
    finally:
        gc.unfreeze()
        gc.enable()
        trainer.close()
    return trainer


def kept(directory: Path) -> dict[str, str]:
    """Name of each checkpoint → what names it."""
    result = inspect.entries(directory / "run")
    return {each.name[-1]: ", ".join(name for name in ("latest", "best") if getattr(each, name)) for each in result}


FALLING = [5.0, 4.0, 4.5, 3.0, 3.5, 3.6, nan, 3.1, 3.2]


@pytest.mark.parametrize("background", [False, True])
def test_the_best_checkpoint_stays_and_a_name_leads_to_it(background, prefix, tmp_path, monkeypatch):
    config = options(prefix, tmp_path, checkpoint={"keep_best": True, "interval": 3, "async_save": background})
    run(config, FALLING, monkeypatch)
    assert kept(tmp_path) == {"4": "best", "9": "latest"}
    named = tmp_path / "run" / "checkpoints" / "best"
    assert checkpoint.find(named).name == "step_00000004"
    assert checkpoint.manifest_of(checkpoint.find(named)).state["loop"]["best"] == {
        "loss": 3.0,
        "step": 4,
        "improved": 3.0,
        "waited": 0,
    }
    check(from_dict(options(prefix, tmp_path, run={"name": "next"}, model={"init_from": str(named)})), 1)


@pytest.mark.parametrize("part", ["save", "mark_best"])
@pytest.mark.parametrize("background", [False, True])
def test_a_loss_whose_checkpoint_could_not_be_saved_is_not_the_best(
    part, background, prefix, tmp_path, monkeypatch, capsys
):
    """After step 4, that of the lowest loss: the next lower one than 4.0 is then the best."""
    whole = getattr(checkpoint, part)

    def failing(directory: Path, *arguments: Any, **named: Any) -> Any:
        if directory.name.endswith("4"):
            raise checkpoint.CheckpointError("the disk is full")
        return whole(directory, *arguments, **named)

    monkeypatch.setattr(checkpoint, part, failing)
    config = options(prefix, tmp_path, checkpoint={"keep_best": True, "interval": 3, "async_save": background})
    run(config, FALLING, monkeypatch)
    assert kept(tmp_path) == {"8": "best", "9": "latest"} and capsys.readouterr().out.count("the disk is full") == 1
    state = checkpoint.manifest_of(checkpoint.find(tmp_path / "run")).state["loop"]["best"]
    assert state == {"loss": 3.1, "step": 8, "improved": 3.0, "waited": 5}


PATIENCE = [
    (FALLING, 2, 0.0, 6),  # 3.5 and 3.6 do not improve on 3.0
    (FALLING, 3, 0.0, 7),  # neither does NaN
    (FALLING, 2, 1.5, 3),  # 4.0 is lower than 5.0 by less than that
    ([9.0 - step for step in range(9)], 1, 0.0, 9),
]


@pytest.mark.parametrize("losses, patience, threshold, end", PATIENCE)
def test_the_run_ends_after_so_many_validations_without_improvement(losses, patience, threshold, end):
    config = from_dict({"train": {"early_stopping_patience": patience, "early_stopping_threshold": threshold}})
    trainer: Any = SimpleNamespace(config=config, loop_state={}, step_done=0)
    lowest = []
    for trainer.step_done, loss in enumerate(losses, start=1):
        lowest.append(best.note(trainer, Losses(loss)))
        if best.stopped_early(config, trainer.loop_state):
            break
    assert trainer.step_done == end
    assert lowest == [
        all(not before <= loss for before in losses[:place]) and loss == loss for place, loss in enumerate(losses[:end])
    ]


def test_a_run_that_ended_early_says_so_and_goes_on_with_more_patience(prefix, tmp_path, monkeypatch, capsys):
    config = options(prefix, tmp_path, train={"early_stopping_patience": 2})
    assert run(config, FALLING, monkeypatch).step_done == 6
    assert checkpoint.find(tmp_path / "run").name == "step_00000006"
    printed = capsys.readouterr().out
    assert (
        "stopping early after step 6: no improvement in 2 validations" in printed
        and "everything is saved" not in printed
    )
    claimed = claim(from_dict(config))
    claimed.lock.release()
    assert claimed.complete is not None and "nothing to do: 6 of 9 steps" in claimed.complete
    assert (
        "the best loss is 3.0000, from step 4. To continue, increase train.early_stopping_patience or leave it unset"
        in claimed.complete
    )
    assert run(options(prefix, tmp_path, train={"early_stopping_patience": 9}), FALLING, monkeypatch).step_done == 9


@pytest.mark.parametrize("stop", [1, 5])
def test_a_run_that_is_stopped_counts_on(stop, prefix, tmp_path, monkeypatch):
    """A signal in any step: the run ends where, and with the best checkpoint with which, it would have ended
    without."""
    changes = {"checkpoint": {"keep_best": True}, "train": {"early_stopping_patience": 3}}
    stopped = options(prefix, tmp_path, **changes, faults={"inject": f"sigterm:rank=0,step={stop}"})
    assert run(stopped, FALLING, monkeypatch).step_done == stop
    assert run(options(prefix, tmp_path, **changes), FALLING, monkeypatch).step_done == 7
    assert kept(tmp_path) == {"4": "best", "7": "latest"}


def test_one_set_can_be_followed_and_one_that_is_not_there_is_refused(prefix, tmp_path, monkeypatch):
    named = {"validation": {"one": prefix, "two": prefix}}
    config = options(prefix, tmp_path, data=named, train={"early_stopping_patience": 2}, validation={"monitor": "two"})
    assert run(config, FALLING, monkeypatch).step_done == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "val_loss" in line][0] == {
        "step": 1,
        "val_loss": 5.0,
        "val_loss/one": 5.0,
        "val_loss/two": 1.0,
    }
    with pytest.raises(
        ConfigError, match=r"validation\.monitor = tow is not a set of data\.validation\. .*Nearest: two"
    ):
        check(from_dict(options(prefix, tmp_path, data=named, validation={"monitor": "tow"})), 1)


# which checkpoint is the best in the end: after step 1 the loss is the lowest
VALIDATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "the same": ("1", {}),
    "the same files, moved": ("1", {"data": {"validation": {"one": "other", "two": "moved"}}}),
    "another set": ("4", {"validation": {"monitor": "one"}}),
    "all sets": ("4", {"validation": {"monitor": None}}),
    "other files": ("4", {"data": {"validation": {"one": "same", "two": "other"}}}),
    "fewer samples": ("4", {"validation": {"batches": 2}}),
    "the average": ("4", {"train": {"ema_decay": 0.9}, "validation": {"ema": True}}),
}


@pytest.mark.parametrize("changed", VALIDATIONS)
def test_losses_of_another_validation_are_not_compared(changed, prefix, tmp_path, monkeypatch):
    """The run resumes with a validation whose losses are all higher."""
    best_step, changes = VALIDATIONS[changed]
    files = {"same": prefix, "other": write_tokens(tmp_path, 96, 400, seed=1), "moved": str(tmp_path / "moved")}
    for end in (".bin", ".idx", ".json"):
        Path(files["moved"] + end).write_bytes(Path(prefix + end).read_bytes())
    first: dict[str, Any] = {
        "data": {"validation": {"one": "other", "two": "same"}},
        "validation": {"monitor": "two", "batches": 1},
    }
    first |= {"checkpoint": {"keep_best": True, "keep": 1}, "train": {"early_stopping_patience": 9}}

    def config(steps: int, **changes: dict[str, Any]) -> dict[str, Any]:
        merged = {section: {**first.get(section, {}), **changes.get(section, {})} for section in {**first, **changes}}
        merged["train"]["steps"] = steps
        merged["data"]["validation"] = {name: files[file] for name, file in merged["data"]["validation"].items()}
        return options(prefix, tmp_path, **merged)

    losses_by_step = [1.0, 2.0, 4.0, 3.0, 3.5, 3.6]
    monkeypatch.setattr(
        validation,
        "losses",
        lambda of: Losses(
            losses_by_step[of.step_done - 1], dict.fromkeys(("one", "two"), losses_by_step[of.step_done - 1])
        ),
    )
    train(config(2))
    assert kept(tmp_path) == {"1": "best", "2": "latest"}
    state = train(config(6, **changes)).loop_state["best"]
    assert {name for name, what in kept(tmp_path).items() if "best" in what} == {best_step}
    assert state["waited"] == (5 if best_step == "1" else 2)


def test_a_run_that_goes_back_forgets_the_best_of_what_came_after(prefix, tmp_path, monkeypatch):
    config = options(prefix, tmp_path, checkpoint={"keep_best": True, "interval": 3, "keep": None})
    run(config, FALLING, monkeypatch)
    assert kept(tmp_path)["4"] == "best"
    older = str(tmp_path / "run" / "checkpoints" / "step_00000003")
    again = options(prefix, tmp_path, checkpoint={"keep_best": True, "load": older}, train={"steps": 5})
    run(again, [0.0, 0.0, 0.0, 4.9, 4.8], monkeypatch)
    assert {name: what for name, what in kept(tmp_path).items() if what} == {"2": "best", "5": "latest"}


def test_nothing_changes_in_a_run_that_follows_nothing(prefix, tmp_path, monkeypatch):
    results = []
    for name, changes in (
        ("plain", {}),
        ("followed", {"checkpoint": {"keep_best": True}, "train": {"early_stopping_patience": 99}}),
    ):
        trainer = run(options(prefix, tmp_path / name, **changes), FALLING, monkeypatch)
        results.append(global_tensors(trainer))
        state = checkpoint.manifest_of(checkpoint.find(tmp_path / name / "run")).state
        assert ("loop" in state) == (name == "followed")
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"checkpoint": {"keep_best": True}}, r"checkpoint\.keep_best = true requires validation"),
        (
            {"train": {"early_stopping_patience": 2}},
            r"train\.early_stopping_patience = 2 requires validation",
        ),
        ({"train": {"early_stopping_patience": 0}}, r"train\.early_stopping_patience = 0 is not a positive size"),
        ({"train": {"early_stopping_threshold": 0.1}}, r"train\.early_stopping_threshold = 0\.1 has no effect"),
    ],
)
def test_what_does_not_fit_is_one_message(changes, message, prefix, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check(from_dict(options(prefix, tmp_path, **{**changes, "validation": {"interval": None}})), 1)
