"""Losses of several validation sets, and of the members of a blend, against sums made sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.assembly import parts as build
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, load_config
from megalite.config.rules import check
from megalite.data.mixtures import Blend
from megalite.monitoring.loss_by_source import LossBySource
from megalite.training.trainer import Trainer
from megalite.training.validation import losses
from megalite.training.verify import global_tensors
from tests.monitoring.test_metrics import example
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import make_trainer
from tests.support.spaces.layouts import Case

STEPS, BATCH = 2, 8
MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 4, "masked": True, "dropout": 0.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"train": {"micro_batch_size": 2}},
    "tp 2, sequence-parallel, chunks": {"parallel": {"tp": 2, "sequence_parallel": True}, "train": {"loss_chunk": 8}},
    "dp 2, cp 2": {"parallel": {"dp": 2, "cp": 2, "zero": 3}},
    "pp 2, ahead": {"parallel": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2}, "train": {"micro_batch_size": 2}},
}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> list[str]:
    """Token files of different sizes."""
    sizes = {"a": 2000, "b": 600, "c": 1300}
    return [write_tokens(directory(tmp_path_factory, name), 96, size, seed=size) for name, size in sizes.items()]


def directory(factory: Any, name: str) -> Path:
    return factory.mktemp(name)


def config_with(prefixes: list[str], blend: dict[str, float], **changes: dict[str, Any]) -> dict[str, Any]:
    config = config_of(MODEL, prefixes[0], "fp64")
    config["train"] |= {"global_batch_size": BATCH, "micro_batch_size": 4, "grad_clip": 0.0}
    config["data"]["train"] = blend
    return {section: {**config.get(section, {}), **changes.get(section, {})} for section in {**config, **changes}}


def by_source(context: Any, config: dict[str, Any]) -> tuple[list[dict[str, float]], list[float]]:
    """The losses by source of each step, and the losses."""
    trainer = make_trainer(context, config)
    observer, known, numbers = LossBySource(trainer), [], []
    try:
        for step in range(1, STEPS + 1):
            results = trainer.train_step(wait=step == STEPS)
            observer.after(step)
            known += results
            numbers += [observer.numbers(example(result.step)) for result in results]
        return numbers, [result.loss for result in known]
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def sample_by_sample(prefixes) -> list[dict[str, float]]:
    """The mean losses of each member in the first step: one sample at a time, with weights that do not change."""
    config = from_dict(
        config_with(
            prefixes, dict(zip(prefixes, (0.5, 0.3, 0.2), strict=True)), optimizer={"lr": 0.0, "weight_decay": 0.0}
        )
    )
    config.train.global_batch_size = config.train.micro_batch_size = 1
    trainer = Trainer(config, build.make_mesh(config))
    assert isinstance(trainer.train_data, Blend)
    losses, tokens = dict.fromkeys(prefixes, 0.0), dict.fromkeys(prefixes, 0)
    for sample in range(BATCH):
        result, name = trainer.step(), prefixes[trainer.train_data.locate(sample)[0]]
        losses[name] += result.loss * result.tokens
        tokens[name] += result.tokens
    trainer.close()
    return [{f"loss/{name}": losses[name] / tokens[name] for name in prefixes if tokens[name]}]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_losses_of_members_are_those_of_their_samples(layout, ranks, prefixes, sample_by_sample):
    config = config_with(prefixes, dict(zip(prefixes, (0.5, 0.3, 0.2), strict=True)), **LAYOUTS[layout])
    parallel = config["parallel"]
    numbers, means = ranks.run(
        parallel["tp"] * parallel["pp"] * parallel["dp"] * parallel.get("cp", 1), by_source, config
    )[0]
    assert numbers[0] == pytest.approx(sample_by_sample[0], rel=1e-9)
    assert len(numbers) == STEPS and min(numbers[1].values()) <= means[1] <= max(numbers[1].values())


def test_a_run_with_losses_by_source_is_the_one_without(prefixes):
    results = []
    for observed in (False, True):
        config = from_dict(config_with(prefixes, {prefixes[0]: 0.5, prefixes[1]: 0.5}))
        trainer = Trainer(config, build.make_mesh(config))
        observer = LossBySource(trainer) if observed else None
        for step in range(1, 4):
            trainer.step()
            if observer is not None:
                observer.after(step)
        results.append(global_tensors(trainer))
        trainer.close()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def validated(context: Any, config: dict[str, Any]) -> tuple[float, dict[str, float]]:
    trainer = make_trainer(context, config)
    try:
        reported = losses(trainer)
        assert trainer.evaluate() == reported.mean
        return reported.mean, reported.by_set
    finally:
        trainer.close()


@pytest.mark.parametrize("parallel", [{}, {"dp": 2, "zero": 3}])
def test_each_validation_set_has_the_loss_that_it_has_alone(parallel, ranks, prefixes):
    def config(validation: Any) -> dict[str, Any]:
        data = {"validation": validation, "eod_mask_loss": False}
        return config_with(
            prefixes, {prefixes[0]: 1.0}, data=data, parallel={**config_of(MODEL, prefixes[0])["parallel"], **parallel}
        )

    world = parallel.get("dp", 1)
    mean, by_set = ranks.run(world, validated, config(dict(zip("bc", prefixes[1:], strict=True))))[0]
    alone = {
        name: ranks.run(world, validated, config(prefix))[0] for name, prefix in zip("bc", prefixes[1:], strict=True)
    }
    assert by_set == {name: loss for name, (loss, _) in alone.items()} and {
        name: each for name, (_, each) in alone.items()
    } == {
        "b": {},
        "c": {},
    }
    samples = {"b": (600 - 1) // 16, "c": (1300 - 1) // 16}
    assert mean == pytest.approx(
        sum(by_set[name] * count for name, count in samples.items()) / sum(samples.values()), rel=1e-12
    )


def test_named_sets_are_read_from_the_command_line_and_bad_ones_are_refused(prefixes, capsys):
    a, b, _ = prefixes
    common = ["--data.train", a, "--model.preset", "tiny", "--data.sequence_length", "16"]
    assert load_config([*common, "--data.validation", f"{{one: {a}, two: {b}}}"], world_size=1).data.validation == {
        "one": a,
        "two": b,
    }
    assert load_config([*common, "--data.validation", f"{{{a}: 0.5, {b}: 0.5}}"], world_size=1).data.validation == {
        a: 0.5,
        b: 0.5,
    }
    with pytest.raises(SystemExit):
        load_config([*common, "--data.validation", f"{{one: {a}, two: {b}x}}"], world_size=1)
    assert f"could not find {b}x.bin" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"logging\.loss_by_source = true has no effect, because data\.train is not a blend"
    ):
        check(from_dict(config_with(prefixes, {a: 1.0}, logging={"loss_by_source": True})), 1)
