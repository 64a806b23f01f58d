"""A run that is saved, ended and resumed is the run that never stopped; on another topology it continues with the same
numbers."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import jobs_schedules, jobs_training, resharding
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.layouts import Case

HALF = 2
PRECISIONS = ("fp32", "bf16", "fp64")
MODEL = {"tied": True, "kv_heads": 1, "vocab_size": 101, "layers": 5, "masked": True, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "single": {"microbatches": 2},
    "tp2-pp2-dp2-zero1": {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "microbatches": 2},
}
MORE: dict[str, tuple[str, Case]] = {
    "dp2-zero0": ("fp16", {"dp": 2, "zero": 0}),
    "dp2-zero1-offload": ("bf16", {"dp": 2, "zero": 1, "offload": "cpu"}),
    "dp2-zero2": ("bf16", {"dp": 2, "zero": 2, "microbatches": 2}),
    "dp2-zero3": ("fp16", {"dp": 2, "zero": 3}),
    "tp2": ("fp16", {"tp": 2, "sequence_parallel": True}),
    "tp2-dp2-zero3": ("bf16", {"tp": 2, "dp": 2, "zero": 3, "microbatches": 2}),
    "pp2-interleaved": ("bf16", {"pp": 2, "microbatches": 4, "schedule": "interleaved-2"}),
    "pp2-zb-v": ("fp32", {"pp": 2, "microbatches": 4, "schedule": "zb-v"}),
    "pp2-dp2-zb-h2-zero2": ("fp16", {"pp": 2, "dp": 2, "zero": 2, "microbatches": 4, "schedule": "zb-h2"}),
}
BITWISE = LAYOUTS | {name: case for name, (_, case) in MORE.items()}
OTHERS: dict[str, Case] = {
    "tp4": {"tp": 4},
    "pp4": {"pp": 4, "microbatches": 8, "schedule": "gpipe"},
    "dp4-zero1": {"dp": 4, "zero": 1},
    "tp2-dp2-zero0": {"tp": 2, "dp": 2, "microbatches": 2},
    "pp2-dp2-interleaved": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "interleaved-2"},
    "tp2-pp2-zb-v": {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb-v"},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def configuration(
    layout: Case, prefix: str, precision: str, directory: Path, **changes: dict[str, Any]
) -> dict[str, Any]:
    config = config_of({**SINGLE, **MODEL, **layout}, prefix, precision, run={"dir": str(directory), "name": "resumed"})
    config["train"]["steps"] = 2 * HALF
    config["fp16"] = {"initial_scale_power": 8, "loss_scale_window": 2}  # doubled in each half, and never too large
    return {section: {**values, **changes.get(section, {})} for section, values in config.items()}


def world(layout: Case) -> int:
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)


@pytest.fixture(scope="module")
def straight(ranks, prefix, tmp_path_factory):
    """The run that never stopped, with the checkpoint that it wrote half-way: computed once for each layout and
    precision."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def run(layout: str, precision: str) -> dict[str, Any]:
        if (layout, precision) not in known:
            config = configuration(BITWISE[layout], prefix, precision, tmp_path_factory.mktemp("run"))
            known[layout, precision] = ranks.run(
                world(BITWISE[layout]), jobs_training.train_and_save, config, HALF, HALF
            )[0]
        return known[layout, precision]

    return run


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize(
    "layout, precision",
    [
        *product(["single"], PRECISIONS),
        *product(["tp2-pp2-dp2-zero1"], PRECISIONS[1:]),
        *((name, each) for name, (each, _) in MORE.items()),
    ],
)
def test_resuming_is_bitwise_the_run_that_never_stopped(layout, precision, ranks, prefix, straight, tmp_path):
    expected = straight(layout, precision)
    config = configuration(BITWISE[layout], prefix, precision, tmp_path, checkpoint={"load": expected["directory"]})
    for got in ranks.run(world(BITWISE[layout]), jobs_training.resume, config, HALF):
        assert got["place"] == {"step": HALF, "samples": 32 * HALF, "skipped": 0}
        assert got["losses"] == expected["losses"][HALF:]
        assert got["grad_norms"] == expected["grad_norms"][HALF:]
        assert not differing(got["tensors"], expected["tensors"])
        assert len(differing(got["started"], got["tensors"])) == len(got["tensors"]), (
            "the second half changes every tensor"
        )


CONTINUED = [
    *((other, saved, "fp64") for other, saved in zip(OTHERS, cycle(LAYOUTS))),
    ("tp2-pp2-zb-v", "single", "fp32"),
]
"""Each from one process or from eight ranks; below, states go from each layout to the next."""


@pytest.mark.parametrize(("other", "saved", "precision"), CONTINUED)
def test_another_topology_continues_with_the_same_numbers(other, saved, precision, ranks, prefix, straight, tmp_path):
    tolerance = {"fp32": 1e-5, "fp64": 1e-9}[precision]
    expected = straight(saved, precision)
    config = configuration(OTHERS[other], prefix, precision, tmp_path, checkpoint={"load": expected["directory"]})
    got = ranks.run(world(OTHERS[other]), jobs_training.resume, config, HALF)[0]
    assert got["losses"] == pytest.approx(expected["losses"][HALF:], rel=tolerance, abs=0)
    assert got["grad_norms"] == pytest.approx(expected["grad_norms"][HALF:], rel=tolerance, abs=0)
    for name, value in got["tensors"].items():
        assert (value - expected["tensors"][name]).abs().max() <= 2 * tolerance, name


@pytest.fixture(scope="module")
def reshardings(ranks, prefix, tmp_path_factory):
    return resharding.Resharding(prefix, tmp_path_factory.mktemp("resharding"), ranks, steps=2)


@pytest.mark.parametrize("number", range(len(resharding.LAYOUTS)))
def test_restored_tensors_are_the_same_bits_and_no_sample_is_lost(number, reshardings):
    """Each layout loads what the one before it has saved; `make test-matrix` runs all pairs, with ten steps each."""
    names = list(resharding.LAYOUTS)
    reshardings.prove(names[number - 1], names[number])


def test_a_run_that_changes_its_schedule_at_every_checkpoint_is_bitwise_the_run_that_does_not(ranks, prefix, tmp_path):
    """Untied, without clipping. zb-h2 and zb-v are in the middle of a step when they save: it ends without being told
    to."""
    schedules = ("1f1b", "zb-h2", "interleaved-3", "zb-v", "gpipe")

    def configuration_of(schedule: str, load: str, steps: int) -> dict[str, Any]:
        layout = {"pp": 2, "dp": 2, "zero": 1, "microbatches": 4, "schedule": schedule, "tied": False, "layers": 7}
        changes = {"checkpoint": {"load": load}, "train": {"grad_clip": 0.0, "steps": steps}}
        return configuration(layout, prefix, "fp32", tmp_path, **changes)

    directory, losses, steps = "none", [], 2 * len(schedules)
    for schedule in schedules:
        results = ranks.run(4, jobs_schedules.advance_and_save, configuration_of(schedule, directory, steps), 2)
        assert all(rank["losses"] == results[0]["losses"] for rank in results)
        directory, losses = results[0]["directory"], losses + results[0]["losses"]
        assert results[0]["pending"] == (schedule in ("zb-h2", "zb-v"))
    expected = ranks.run(4, jobs_schedules.advance_and_save, configuration_of("1f1b", "none", steps), steps)[0]
    assert losses == expected["losses"]
    assert not differing(results[0]["tensors"], expected["tensors"])


def test_a_warm_start_takes_the_weights_and_nothing_else(ranks, prefix, straight, tmp_path):
    """Written by 8 ranks, taken by 4 of another layout, with the same model but other training options."""
    origin = straight("tp2-pp2-dp2-zero1", "fp32")
    resumed = configuration(LAYOUTS["single"], prefix, "fp32", tmp_path, checkpoint={"load": origin["directory"]})
    weights = ranks.run(1, jobs_training.resume, resumed, 0)[0]["started"]
    config = configuration(
        OTHERS["pp4"], prefix, "fp32", tmp_path, model={"init_from": origin["directory"]}, train={"steps": 3}
    )
    for got in ranks.run(4, jobs_training.resume, config, 2):
        assert got["place"] == {"step": 0, "samples": 0, "skipped": 0}
        for name, value in got["started"].items():
            assert torch.equal(value, weights[name]) if name.startswith("weight/") else not value.any(), name
        assert got["losses"][0] != origin["losses"][0]


def test_ranks_that_resume_refuse_alike(ranks, prefix, straight, tmp_path):
    layout = LAYOUTS["tp2-pp2-dp2-zero1"]
    changes = {"checkpoint": {"load": straight("single", "fp32")["directory"]}, "model": {"rope_theta": 5e5}}
    messages = ranks.run(8, jobs_training.refusal, configuration(layout, prefix, "fp32", tmp_path, **changes))
    assert len(set(messages)) == 1 and "model.rope_theta was 10000.0, is 500000.0" in messages[0]
