"""The steps of a run that is resumed with other batches: those that are done, and as many more as its samples need."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from megalite.config.load import from_dict, to_dict
from megalite.config.rampup import samples_after
from megalite.config.run_length import batches_done, resolve_steps, resume_steps, with_batches
from megalite.config.schema import Config
from megalite.optimizer.schedule import learning_rate

SEQUENCE = 16


def start(
    batch: int, *, samples: int | None = None, ramp: list[int] | None = None, steps: int = 100, **optimizer: Any
) -> Config:
    config = from_dict(
        {"data": {"sequence_length": SEQUENCE}, "optimizer": {"lr": 1.0, "decay": "linear", **optimizer}}
    )
    config.train.global_batch_size, config.train.rampup_batch_size, config.train.steps = batch, ramp, steps
    config.train.tokens = None if samples is None else samples * SEQUENCE
    resolve_steps(config)
    return config


def resume(config: Config, before: Config, step: int) -> Config:
    """Continue what a checkpoint keeps of the run before."""
    state = json.loads(json.dumps({"config": to_dict(before), **batches_done(before)}))
    resume_steps(config, with_batches(from_dict(state["config"]), state), step)
    return config


def read(config: Config) -> list[int]:
    """The samples that have been read after each step."""
    return [samples_after(config.train, step) for step in range(1, config.train.steps + 1)]


def rates(config: Config) -> list[float]:
    return [learning_rate(config, step) for step in range(1, config.train.steps + 1)]


def of_samples(samples: list[int], warmup: float, total: int, low: float = 0.0) -> list[float]:
    """Linear warm-up and decay over samples, told anew."""
    return [each / warmup if each < warmup else 1 - (1 - low) * (each - warmup) / (total - warmup) for each in samples]


LENGTHS = {
    # (first batch, steps done, second batch) → samples after each step of 40
    "larger": (4, 4, 8, [4, 8, 12, 16, 24, 32, 40]),
    "smaller": (8, 2, 4, [8, 16, 20, 24, 28, 32, 36, 40]),
    "a last batch that is not needed whole": (4, 3, 12, [4, 8, 12, 24, 36, 48]),
    "the same": (4, 3, 4, list(range(4, 41, 4))),
    "before the first step": (4, 0, 8, [8, 16, 24, 32, 40]),
    "nothing is left": (10, 4, 20, [10, 20, 30, 40]),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_finished_samples_count_and_the_rest_is_read_in_present_batches(case):
    first, done, second, expected = LENGTHS[case]
    config = resume(start(second, samples=40, warmup_steps=Fraction(1, 5)), start(first, samples=40), done)
    assert (config.train.steps, read(config)) == (len(expected), expected)
    if expected[-1] == 40 and len(expected) > done:
        assert rates(config) == pytest.approx(of_samples(expected, 8, 40)), (
            "the rate of as many samples is that of one batch size"
        )


def test_it_can_be_resumed_with_others_again():
    first, second = start(4, samples=40), resume(start(8, samples=40), start(4, samples=40), 4)
    assert (first.train.steps, second.train.steps) == (10, 7)
    third = resume(start(2, samples=40), second, 5)
    assert read(third) == [4, 8, 12, 16, 24, *range(26, 41, 2)]
    again = resume(start(2, samples=40), third, 7)
    assert read(again) == read(third) and again.train.finished == third.train.finished, (
        "the same batches change nothing"
    )
    longer = resume(start(2, samples=60), third, 7)
    assert read(longer)[-1] == 60 and longer.train.steps == 5 + 18


def test_a_warm_up_in_steps_counts_steps():
    config = resume(start(8, samples=80, warmup_steps=5), start(4, samples=80, warmup_steps=5), 3)
    assert read(config)[:6] == [4, 8, 12, 20, 28, 36]
    assert rates(config)[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1 - (36 - 28) / (84 - 28)])
    assert rates(config)[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_decay_of_a_share_ends_with_the_samples():
    wsd = {"decay": "wsd", "wsd_decay_fraction": 0.5}
    config = resume(start(8, samples=80, **wsd), start(4, samples=80, **wsd), 10)
    assert read(config)[8:] == [36, 40, 48, 56, 64, 72, 80]
    assert rates(config)[8:] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], abs=1e-12)


def test_a_length_in_steps_counts_steps():
    config = resume(start(8, steps=10, warmup_steps=2), start(4, steps=10, warmup_steps=2), 4)
    assert config.train.steps == 10 and rates(config) == rates(start(4, steps=10, warmup_steps=2))
    assert read(config) == [4, 8, 12, 16, *range(24, 65, 8)], "what is reported counts the batches as they were"


def test_a_ramp_continues_at_the_samples_that_were_read():
    ramp = [2, 2, 24]  # to 8: 2, 4, 6 for 8 samples each
    before = start(8, samples=64, ramp=ramp)
    assert read(before) == [2, 4, 6, 8, 12, 16, 22, 28, 36, 44, 52, 60, 68]
    config = resume(start(6, samples=64, ramp=ramp), before, 5)  # to 6: 2, 4 for 12 samples each
    assert read(config) == [2, 4, 6, 8, 12, 16, 20, 24, *range(30, 67, 6)]
    without = resume(start(8, samples=64), before, 5)
    assert read(without) == [2, 4, 6, 8, 12, *range(20, 69, 8)]
