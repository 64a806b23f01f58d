"""The average of the weights (`train.ema_decay`) is the recursion over the weights of one process, on every layout and
through a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalite.assembly import parts as build
from megalite.checkpoint import CheckpointError, manifest_of
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.rules import check
from megalite.generation.language_model import LanguageModel
from megalite.huggingface.convert import export_model
from megalite.optimizer.registry import STATE
from megalite.training.meta_device import check_states
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support import jobs, jobs_training
from tests.support.configs import case_of, config_of, config_of_one_process, write_tokens
from tests.support.spaces.layouts import Case

DECAY, STEPS, SKIPPED = 0.8, 5, 3
MODEL: Case = case_of(tied=True, kv_heads=2, vocab_size=96, layers=4, masked=False, dropout=0.0, microbatches=2)
LAYOUTS: dict[str, tuple[str, Case]] = {
    "dp 2, ZeRO-0": ("fp64", {"dp": 2, "zero": 0}),
    "dp 2, ZeRO-2": ("fp64", {"dp": 2, "zero": 2}),
    "tp 2, dp 2, ZeRO-1": ("fp64", {"tp": 2, "dp": 2, "zero": 1}),
    "dp 2, ZeRO-3": ("fp64", {"dp": 2, "zero": 3}),
    "pp 2, zb-v": ("fp64", {"pp": 2, "microbatches": 4, "schedule": "zb-v", "tied": False}),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def changed(config: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    return {section: {**config.get(section, {}), **changes.get(section, {})} for section in {**config, **changes}}


def trainer(config: dict[str, Any]) -> Trainer:
    parsed = from_dict(config)
    return Trainer(parsed, build.make_mesh(parsed))


def weights_of_each_step(config: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The weights of a run without an average, before its first step and after each one."""
    run = trainer(config)
    try:
        weights = [global_tensors(run)]
        for _ in range(STEPS):
            run.step()
            weights.append(global_tensors(run))
        return weights
    finally:
        run.close()


def recursion(weights: list[dict[str, Tensor]], skipped: int | None = None) -> dict[str, Tensor]:
    """In float64, over applied steps alone."""
    average = {name: value.double() for name, value in weights[0].items()}
    for step in range(1, len(weights)):
        if step != skipped:
            average = {
                name: DECAY * value + (1 - DECAY) * weights[step][name].double() for name, value in average.items()
            }
    return average


def distance(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert {name.removeprefix("ema/") for name in tensors} == {name.removeprefix("weight/") for name in expected}
    return max(
        (tensors["ema/" + name.removeprefix("weight/")].double() - value).abs().max().item()
        for name, value in expected.items()
    )


AVERAGE = {"train": {"ema_decay": DECAY}}


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-6), ("bf16", 1e-6), ("fp64", 1e-14)])
def test_it_is_the_recursion_over_the_weights_and_a_skipped_step_does_not_move_it(precision, bound, prefix):
    config = config_of(
        MODEL, prefix, precision, faults={"inject": f"nan:rank=0,step={SKIPPED}"}, optimizer={"lr": 1e-2}
    )
    weights = weights_of_each_step(config)
    run = trainer(changed(config, **AVERAGE))
    try:
        results = [run.step() for _ in range(STEPS)]
        average, own = global_tensors(run, ("ema",)), global_tensors(run)
    finally:
        run.close()
    assert [result.skipped for result in results] == [step == SKIPPED for step in range(1, STEPS + 1)]
    assert distance(average, recursion(weights, SKIPPED)) <= bound
    assert all(torch.equal(value, weights[-1][name]) for name, value in own.items()), (
        "the run itself is the one without an average"
    )


@pytest.fixture(scope="module")
def one_process(prefix) -> dict[bool, dict[str, Tensor]]:
    """The average by whether the model is tied."""
    return {
        tied: recursion(
            weights_of_each_step(config_of_one_process({**MODEL, "precision": "fp64", "tied": tied}, prefix))
        )
        for tied in (True, False)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_average_of_one_process(layout, ranks, prefix, one_process):
    precision, case = LAYOUTS[layout]
    case = {**MODEL, **case}
    config = changed(config_of(case, prefix, precision), **AVERAGE)
    averages = ranks.run(case["tp"] * case["pp"] * case["dp"], jobs.train, config, STEPS, ("ema",))[0]["tensors"]
    assert distance(averages, one_process[case["tied"]]) <= 1e-9


@pytest.mark.parametrize("saved, other", [("dp 2, ZeRO-3", {"tp": 2}), ("offload", {"dp": 2, "zero": 2})])
def test_it_is_saved_and_resumed_bitwise_and_on_another_layout(saved, other, ranks, prefix, tmp_path):
    case = {**MODEL, **({"dp": 2, "zero": 1, "offload": "cpu"} if saved == "offload" else LAYOUTS[saved][1])}
    kinds = (*STATE, "ema")
    config = changed(config_of(case, prefix, "bf16", run={"dir": str(tmp_path), "name": "run"}), **AVERAGE)
    straight = ranks.run(2, jobs_training.train_and_save, config, 2, 2, kinds)[0]
    loads = {"checkpoint": {"load": straight["directory"]}}
    again = ranks.run(2, jobs_training.resume, changed(config, **loads), 2, kinds)[0]
    assert again["tensors"].keys() == straight["tensors"].keys() and any(
        name.startswith("ema/") for name in again["tensors"]
    )
    assert all(torch.equal(value, straight["tensors"][name]) for name, value in again["tensors"].items())
    elsewhere = changed(config_of({**MODEL, **other}, prefix, "bf16"), **AVERAGE, **loads)
    resumed = ranks.run(2, jobs_training.resume, elsewhere, 0, kinds)[0]["started"]
    assert all(torch.equal(value, resumed[name]) for name, value in again["started"].items())


def test_undone_steps_do_not_move_it(ranks, prefix):
    """Steps whose clipping is known only after their update: ahead of it and waiting for it give the same bits."""
    case = {**MODEL, **LAYOUTS["pp 2, zb-v"][1]}
    results = []
    for optimistic in (True, False):
        config = changed(config_of(case, prefix), **AVERAGE, parallel={"optimistic_step": optimistic})
        config["train"]["grad_clip"] = 0.4
        results.append(ranks.run(2, jobs.train, config, STEPS, ("weight", "ema"))[0])
    assert max(results[0]["grad_norms"]) > 0.4, "it clips"
    assert all(torch.equal(value, results[1]["tensors"][name]) for name, value in results[0]["tensors"].items())


@pytest.mark.parametrize(
    "name, layout",
    [("adamw", {"dp": 2, "zero": 3}), ("muon", {"tp": 2, "zero": 1}), ("adamw", {"pp": 2, "schedule": "zb-v"})],
)
def test_the_planner_knows_its_bytes(name, layout, prefix):
    config = changed(config_of({**MODEL, "tied": False, **layout}, prefix, "bf16"), **AVERAGE, optimizer={"name": name})
    check_states(from_dict(config), [0, 1], "cuda")


def test_a_resumed_run_can_begin_one(prefix, tmp_path):
    config = config_of(MODEL, prefix, run={"dir": str(tmp_path), "name": "run"})
    first = trainer(config)
    first.step()
    directory = str(first.save())
    first.close()
    run = trainer(changed(config, **AVERAGE, checkpoint={"load": directory}))
    average, weights = global_tensors(run, ("ema",)), global_tensors(run)
    run.close()
    assert distance(average, weights) == 0
    with pytest.raises(
        CheckpointError, match=r"does not contain averaged weights because train\.ema_decay was not set"
    ):
        manifest_of(Path(directory)).averaged()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_validated_and_exported_in_place_of_the_weights(precision, prefix, tmp_path):
    config = config_of(MODEL, prefix, precision, run={"dir": str(tmp_path), "name": "run"}, optimizer={"lr": 1e-2})
    config = changed(config, **AVERAGE, data={"validation": 0.1}, validation={"interval": 1, "batches": 2, "ema": True})
    averaged, plain = (
        trainer(config),
        trainer(changed(config, run={"name": "plain"}, train={"ema_decay": None}, validation={"ema": False})),
    )
    try:
        for _ in range(2):
            averaged.step(), plain.step()
        before = global_tensors(averaged, (*STATE, "ema"))
        loss, directory = averaged.evaluate(), averaged.save()
        after = global_tensors(averaged, (*STATE, "ema"))
        assert loss != plain.evaluate()
        assert averaged.step().loss == plain.step().loss, "validation leaves the weights as they were"
    finally:
        averaged.close(), plain.close()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    export_model(manifest_of(directory).averaged(), tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], before["ema/embedding.weight"])
    average, other = LanguageModel(directory, average=True), LanguageModel(f"hf:{tmp_path / 'exported'}")
    assert torch.equal(average.logits([[3, 5, 7]]), other.logits([[3, 5, 7]]))
    assert not torch.equal(average.logits([[3, 5, 7]]), LanguageModel(directory).logits([[3, 5, 7]]))
    started = trainer(
        changed(
            config, run={"name": "other"}, model={"init_from": f"hf:{tmp_path / 'exported'}"}, validation={"ema": False}
        )
    )
    assert started.evaluate() == loss
    started.close()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train": {"ema_decay": 1.0}}, r"train\.ema_decay = 1\.0 is out of range"),
        (
            {"train": {"ema_decay": 0.9}, "parallel": {"offload": "disk"}},
            r"train\.ema_decay = 0\.9 would read and write the whole average",
        ),
        (
            {"validation": {"ema": True}},
            r"validation\.ema = true requires an average of the weights, but train\.ema_decay = null",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(changes, message, prefix):
    with pytest.raises(ConfigError, match=message):
        check(from_dict(changed(config_of(MODEL, prefix), **changes)), 1)
