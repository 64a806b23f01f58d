"""fp16: the loss scale follows DeepSpeed's rules, all ranks skip together, and training goes on."""

from __future__ import annotations

import pytest
import torch

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.config.sections.fp16 import FP16Config
from megalite.optimizer.loss_scale import LossScale
from megalite.training.trainer import Trainer
from tests.support import jobs_training
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {
    **SINGLE,
    "tied": False,
    "kv_heads": 2,
    "vocab_size": 96,
    "layers": 4,
    "masked": False,
    "dropout": 0.0,
    "microbatches": 4,
}


def scales(events: str, **options) -> list[float]:
    """The scale after each step: `.` is finite, `x` is not."""
    scale = LossScale(FP16Config(**options), active=True)
    return [(scale.update(event == "."), scale.value)[1] for event in events]


def test_the_scale_by_hand():
    assert scales("x", initial_scale_power=4, hysteresis=1) == [8.0]
    assert scales("xxx", initial_scale_power=4, hysteresis=2) == [16.0, 8.0, 4.0]
    assert scales("xxxx", initial_scale_power=2, hysteresis=1, min_loss_scale=1.0) == [2.0, 1.0, 1.0, 1.0]
    assert scales("......", initial_scale_power=4, loss_scale_window=3) == [16.0, 16.0, 32.0, 32.0, 32.0, 64.0]
    assert scales("x...x", initial_scale_power=4, hysteresis=1, loss_scale_window=3) == [8.0, 8.0, 8.0, 16.0, 8.0]
    # patience is back
    assert scales("x...x", initial_scale_power=4, hysteresis=2, loss_scale_window=3) == [16.0, 16.0, 16.0, 32.0, 32.0]


def test_without_fp16_nothing_is_scaled():
    scale = LossScale(FP16Config(), active=False)
    scale.update(False)
    assert scale.value == 1.0


def test_state_continues():
    options = FP16Config(initial_scale_power=4, hysteresis=2, loss_scale_window=3)
    one, other = LossScale(options, active=True), LossScale(options, active=True)
    for finite in (True, False):
        one.update(finite)
    other.load(one.state())
    for finite in (True, True, True, False, False):
        one.update(finite)
        other.update(finite)
        assert one == other


def test_a_scale_at_its_minimum_continues_there():
    options = FP16Config(initial_scale_power=2, hysteresis=1)
    one, other = LossScale(options, active=True), LossScale(options, active=True)
    for _ in range(3):
        one.update(False)
    assert one.value == options.min_loss_scale == 1.0
    other.load(one.state())
    assert one == other


def test_a_run_of_another_precision_leaves_nothing_to_continue():
    scale = LossScale(FP16Config(), active=True)
    scale.load(LossScale(FP16Config(), active=False).state())
    assert scale == LossScale(FP16Config(), active=True)


@pytest.fixture
def prefix(tmp_path) -> str:
    return write_tokens(tmp_path, 96)


def fp16(case, prefix: str, **options):
    config = config_of(case, prefix, "fp16")
    config["fp16"] = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 4, **options}
    return config


def train(config, steps: int):
    resolved = from_dict(config)
    trainer = Trainer(resolved, build.make_mesh(resolved))
    results = [trainer.step() for _ in range(steps)]
    trainer.close()
    return results


def test_fp16_follows_fp32(prefix):
    narrow, wide = (
        train(fp16(CASE, prefix, initial_scale_power=12, loss_scale_window=1000), 8),
        train(config_of(CASE, prefix), 8),
    )
    for got, expected in zip(narrow, wide, strict=True):
        assert got.loss == pytest.approx(expected.loss, rel=2e-3) and got.loss_scale == 4096.0
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=5e-3)
    assert [got.loss for got in narrow] != [expected.loss for expected in wide]


def test_too_large_a_scale_finds_its_way_down(prefix):
    """Really overflowing gradients: steps are skipped until the scale fits, and from there the run is one that started
    with it."""
    results = train(fp16(CASE, prefix, initial_scale_power=26, loss_scale_window=1000), 14)
    skipped = [result.skipped for result in results]
    count = skipped.index(False)
    assert count > 2 and not any(skipped[count:])
    assert [result.loss_scale for result in results] == [2.0 ** (26 - min(step, count)) for step in range(14)]
    assert results[-1].loss < results[0].loss


@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"tp": 2, "pp": 2, "dp": 2, "zero": 1}])
def test_an_overflow_on_one_rank_skips_everywhere(layout, ranks, prefix):
    case = {**CASE, **layout}
    world = case["tp"] * case["pp"] * case["dp"]
    outcomes = ranks.run(world, jobs_training.train_with_infinite_gradient, fp16(case, prefix), 3, world - 1, 8)
    for rank in outcomes:
        assert rank["skipped"] == [step == 3 for step in range(1, 9)] and rank["count"] == 1
        assert rank["losses"] == outcomes[0]["losses"]
        assert rank["loss_scales"] == [256.0, 256.0, 256.0, 128.0, 128.0, 128.0, 128.0, 256.0]
        before, after = rank["kept"]
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert outcomes[0]["losses"][-1] < outcomes[0]["losses"][0]
