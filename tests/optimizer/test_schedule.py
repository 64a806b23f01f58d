"""Learning-rate schedules against torch's schedulers, and by hand at their corners."""

import pytest
import torch
from torch.optim import lr_scheduler

from megalite.config.load import from_dict
from megalite.optimizer.schedule import batch_scale, learning_rate

STEPS, WARMUP, PEAK, LOW = 50, 8, 0.3, 0.03


def config(**optimizer):
    options = {"lr": PEAK, "min_lr": LOW, "warmup_steps": WARMUP, **optimizer}
    return from_dict({"train": {"steps": STEPS, "global_batch_size": 64}, "optimizer": options})


def torchs(make_decay, start: int = WARMUP) -> list[float]:
    """Linear warm-up and then what `make_decay` makes, from torch; the rates of steps 1 … STEPS."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    warmup = lr_scheduler.LambdaLR(optimizer, lambda step: min(step / WARMUP, 1.0) if WARMUP else 1.0)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, make_decay(optimizer)], milestones=[start])
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def linear(length: int):
    return lambda optimizer: lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=LOW / PEAK, total_iters=length
    )


SCHEDULES = {
    "cosine": (
        {},
        lambda: torchs(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS - WARMUP, eta_min=LOW)),
    ),
    "linear": ({}, lambda: torchs(linear(STEPS - WARMUP))),
    "wsd": ({"wsd_decay_fraction": 0.2}, lambda: torchs(linear(10), start=STEPS - 10)),
    "constant": ({}, lambda: torchs(lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0))),
}


@pytest.mark.parametrize("decay", SCHEDULES)
# SequentialLR steps its own schedulers in a way that torch warns about
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rates_are_those_of_torchs_schedulers(decay):
    options, reference = SCHEDULES[decay]
    got = [learning_rate(config(decay=decay, **options), step) for step in range(1, STEPS + 1)]
    assert got == pytest.approx(reference(), rel=1e-9)
    assert (
        max(got) == pytest.approx(PEAK)
        and got[WARMUP - 1] == pytest.approx(PEAK)
        and got[0] == pytest.approx(PEAK / WARMUP)
    )


CORNERS = {"cosine": (0.165, LOW), "linear": (0.165, LOW), "wsd": (PEAK, LOW), "constant": (PEAK, PEAK)}


@pytest.mark.parametrize("decay", CORNERS)
def test_corners_by_hand(decay):
    middle, end = CORNERS[decay]
    assert learning_rate(config(decay=decay), 29) == pytest.approx(middle)  # half-way between 8 and 50
    assert learning_rate(config(decay=decay), STEPS) == pytest.approx(end)
    assert learning_rate(config(decay=decay), STEPS + 5) == pytest.approx(end)
    assert learning_rate(config(decay=decay, warmup_steps=STEPS, wsd_decay_fraction=0.0), STEPS // 2) == pytest.approx(
        PEAK / 2
    )


SHORT = {
    # (decay, steps, options) → the rates of all steps
    "wsd of half a step": ("wsd", 5, {"wsd_decay_fraction": 0.1}, [PEAK] * 4 + [LOW]),
    "wsd of a hundredth of a step": ("wsd", 4, {"wsd_decay_fraction": 0.0025}, [PEAK] * 3 + [LOW]),
    "wsd of one and a half steps": (
        "wsd",
        6,
        {"wsd_decay_fraction": 0.25},
        [PEAK] * 4 + [PEAK - (PEAK - LOW) / 3, LOW],
    ),
    "wsd after a warm-up": (
        "wsd",
        5,
        {"wsd_decay_fraction": 0.1, "warmup_steps": 2},
        [PEAK / 2, PEAK, PEAK, PEAK, LOW],
    ),
    "cosine of one step": ("cosine", 3, {"warmup_steps": 2}, [PEAK / 2, PEAK, LOW]),
    "linear of one step": ("linear", 1, {}, [LOW]),
    "a warm-up that leaves no decay": ("cosine", 2, {"warmup_steps": 2}, [PEAK / 2, PEAK]),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_decay_shorter_than_a_step_ends_at_the_minimum(name):
    decay, steps, options, expected = SHORT[name]
    resolved = config(decay=decay, **{"warmup_steps": 0, **options})
    resolved.train.steps = steps
    assert [learning_rate(resolved, step) for step in range(1, steps + 1)] == pytest.approx(expected)


def test_a_decay_shorter_than_a_whole_batch_ends_at_the_minimum():
    """With a ramp-up of the batch size the run is 5 steps of 4 sequences, which is 0.31 of a whole batch."""
    for decay in ("cosine", "linear", "wsd"):
        resolved = config(decay=decay, warmup_steps=0)
        resolved.train.steps, resolved.train.rampup_batch_size = 5, [4, 4, 1000]
        assert learning_rate(resolved, 5) == pytest.approx(LOW), decay
        assert learning_rate(resolved, 4) > 1.5 * LOW, decay


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_batch_scaling_moves_peak_and_minimum(rule, factor):
    scaled = config(lr_scaling=rule, base_batch_size=16)  # the batch is 64
    assert batch_scale(scaled) == factor
    for step in (1, WARMUP, 29, STEPS):
        assert learning_rate(scaled, step) == pytest.approx(factor * learning_rate(config(), step))
