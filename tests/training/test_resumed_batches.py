"""A run that is resumed with another global batch size ends after the samples that were asked for, and every figure
counts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.assembly import parts as build
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict
from megalite.config.rampup import samples_after, steps_for
from megalite.config.run_length import resolve_steps
from megalite.config.schema import OPTIONS, Config
from megalite.monitoring.epochs import Epochs, planned_samples
from megalite.training.fit import measured
from megalite.training.run_directory import claim
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 1, "masked": False, "dropout": 0.0}
SAMPLES = 24


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def resolved(prefix: str, directory: Path, batch: int, samples: int = SAMPLES, decay: str = "linear") -> Config:
    """As the command line resolves it: the length is given in tokens."""
    tree: dict[str, Any] = config_of(CASE, prefix, run={"dir": str(directory), "name": "run"})
    tree["optimizer"] |= {"decay": decay, "warmup_steps": 0, "lr": 0.01, "min_lr": 0.0}
    tree["train"] |= {"global_batch_size": batch, "micro_batch_size": 2, "rampup_batch_size": None}
    tree["checkpoint"] = {}
    config = from_dict(tree)
    config.train.tokens = samples * config.data.sequence_length
    resolve_steps(config)
    return config


def test_it_ends_after_the_samples_that_were_asked_for(prefix, tmp_path):
    """2 steps of 4, 1 of 8, 4 of 2: 24 samples; the rate and the epochs are those of the samples, and no change has to
    be accepted."""
    rates, seen, batches = [], [], []
    for batch, steps in ((4, 2), (8, 1), (2, 4)):
        config = resolved(prefix, tmp_path, batch)
        claimed = claim(config)
        assert claimed.complete is None
        claimed.lock.release()
        trainer = Trainer(config, build.make_mesh(config))
        assert (
            planned_samples(trainer) == SAMPLES
            and trainer.config.train.steps == trainer.step_done + (SAMPLES - trainer.samples) // batch
        )
        for _ in range(steps):
            before, result = trainer.samples, trainer.step()
            rates.append(result.lr)
            batches.append(trainer.samples - before)
            numbers = measured(trainer, result)
            seen.append(Epochs(trainer).numbers(numbers)["tokens_seen"] // config.data.sequence_length)
        trainer.save()
        done, last = trainer.step_done == trainer.config.train.steps, trainer.samples
        trainer.close()
    assert (done, last, batches) == (True, SAMPLES, [4, 4, 8, 2, 2, 2, 2])
    assert seen == [4, 8, 16, 18, 20, 22, 24]
    assert rates == pytest.approx([0.01 * (1 - each / SAMPLES) for each in seen], abs=1e-15)
    claimed = claim(resolved(prefix, tmp_path, 2))
    assert claimed.complete is not None and claimed.complete.startswith("nothing to do: all 7 steps are done")
    claimed.lock.release()
    longer = resolved(prefix, tmp_path, 2, samples=30)
    with pytest.raises(ConfigError, match=r"train.steps = 10, but .* was made for 7: the learning rate would change"):
        Trainer(longer, build.make_mesh(longer))
    longer = resolved(prefix, tmp_path, 2, samples=30, decay="constant")
    trainer = Trainer(longer, build.make_mesh(longer))
    assert (trainer.step_done, trainer.config.train.steps, planned_samples(trainer)) == (7, 10, 30)
    trainer.close()


def test_a_changed_copy_of_a_configuration_counts_the_same_samples(prefix, tmp_path):
    """What was counted is no option: neither config.yaml nor the command line has it."""
    first = resolved(prefix, tmp_path, 4)
    trainer = Trainer(first, build.make_mesh(first))
    trainer.step()
    trainer.save()
    trainer.close()
    resumed = Trainer(config := resolved(prefix, tmp_path, 8), build.make_mesh(config))
    copy = replace(resumed.config.train, recompute="full")
    resumed.close()
    assert [samples_after(train, 2) for train in (resumed.config.train, copy)] == [12, 12]
    assert steps_for(copy, copy.horizon.samples or 0) == copy.steps == 4
    stored = to_dict(replace(resumed.config, train=copy))["train"]
    assert stored.keys() == {option.partition(".")[2] for option in OPTIONS if option.startswith("train.")}
    with pytest.raises(ConfigError, match="train.horizon in the configuration is not a known option"):
        from_dict({"train": {"horizon": [24, None]}})
