"""The ramp-up of the batch size against a re-telling step by step."""

from __future__ import annotations

import pytest

from megalite.config.rampup import batch_size, position, samples_after, steps_for
from megalite.config.schema import Config
from megalite.config.sections.train import TrainConfig
from megalite.optimizer.schedule import learning_rate

RAMPS = [([8, 8, 100], 32), ([4, 4, 7], 32), ([32, 8, 100], 32), ([2, 6, 1000], 20), ([1, 1, 3], 64), (None, 16)]


def sizes_by_rule(ramp: list[int] | None, full: int, steps: int) -> list[int]:
    """Megatron-LM's rule: after each SAMPLES / increments samples the batch grows by one increment."""
    sizes, samples = [], 0
    for _ in range(steps):
        size = full
        if ramp is not None and samples < ramp[2]:
            increments = (full - ramp[0]) // ramp[1]
            size = (
                ramp[0] + sum(samples >= number * ramp[2] / increments for number in range(1, increments + 1)) * ramp[1]
            )
        sizes.append(size)
        samples += size
    return sizes


@pytest.mark.parametrize("ramp, full", RAMPS)
def test_sizes_and_sums_are_those_of_the_rule(ramp, full):
    train = TrainConfig(rampup_batch_size=ramp, global_batch_size=full)
    sizes, samples = sizes_by_rule(ramp, full, 200), 0
    for step, size in enumerate(sizes):
        assert (batch_size(train, samples), samples_after(train, step)) == (size, samples)
        assert steps_for(train, samples) == step and steps_for(train, samples + 1) == step + 1
        samples += size


def test_a_long_ramp_costs_nothing():
    train = TrainConfig(rampup_batch_size=[32, 32, 10**15], global_batch_size=1024)
    assert batch_size(train, samples_after(train, 10**12)) == 32 + 32 * (samples_after(train, 10**12) * 31 // 10**15)
    assert steps_for(train, samples_after(train, 10**13)) == 10**13


@pytest.mark.parametrize("ramp, full", [([4, 4, 9], 0), ([4, 4], 8), ([4, 0, 9], 8), ([], 8), ([4, 3, 9], 8)])
def test_what_a_rule_refuses_is_no_ramp(ramp, full):
    train = TrainConfig(rampup_batch_size=ramp, global_batch_size=full)
    assert (batch_size(train, 5), samples_after(train, 3), position(train, 3)) == (full, 3 * full, 3)


def test_the_learning_rate_follows_the_samples():
    """After as many samples a run with a ramp-up has the rate of one without."""
    ramped, plain = Config(), Config()
    for config in (ramped, plain):
        config.optimizer.warmup_steps, config.train.global_batch_size = 10, 32
    ramped.train.rampup_batch_size = [8, 24, 64]  # 8 steps of 8, then of 32
    plain.train.steps, ramped.train.steps = 100, 8 + 98
    assert samples_after(ramped.train, ramped.train.steps) == 3200 and position(plain.train, 7) == 7
    for step in (4, 8, 9, 15, 60, 106):
        rate = learning_rate(ramped, step)
        assert rate == pytest.approx(
            learning_rate(plain, samples_after(ramped.train, step) // 32), rel=1e-12, abs=1e-18
        ), step
