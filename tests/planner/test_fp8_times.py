"""Predicted times of matmuls in fp8: by hand, and where they are slower than those in 16 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.parallel.fp8_choice import NO_FP8
from megalite.planner.cost.fp8_times import RECIPES, Fp8Times
from megalite.planner.hardware.constants import CONSTANTS
from megalite.planner.hardware.devices import Link, find_device
from megalite.planner.report.fp8_effect import fp8_effect, fp8_effect_of_run
from megalite.planner.time.prediction import choice_of
from megalite.planner.time.step import LayoutChoice, PlannedJob, Stepper

H100 = find_device("h100")
RATE = 1e12
"""FLOP/s of every matmul in 16 bits on EVEN, so that the times of a step's matmuls add up by hand."""
EVEN = replace(H100, rates=((1.0, RATE), (2.0, RATE)), kernel=0.0, host_time=0.0)
MODEL = {
    **{"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 256},
}
WEIGHTS = {"qkv": (512, 1024), "out": (512, 512), "in": (512, 2560), "down": (1280, 512)}
"""Inputs and outputs of a layer's matrices."""


def config(fp8: str, model: dict[str, object] | None = None, **train: object) -> Config:
    options = {"global_batch_size": 4, "micro_batch_size": 2, "precision": "bf16", "fp8": fp8, **train}
    return from_dict({"model": MODEL | (model or {}), "data": {"sequence_length": 256}, "train": options})


def seconds(config: Config, device: object = EVEN, **choice: object) -> float:
    layout = LayoutChoice(zero=0, micro_batch_size=2, **choice)
    return Stepper(PlannedJob.of(config, device)).step(layout).total


def test_large_matmuls_reach_the_rate_of_the_recipe_and_thin_ones_their_bytes() -> None:
    for name, peak in (("block", 1979e12), ("delayed", 1979e12)):
        times = Fp8Times(H100, name, "bf16")
        reached = 2 * 16384**3 / times.time(16384, 16384, 16384)
        assert 0.93 < reached / (peak * H100.sustained * RECIPES[name].speed) <= 1
    thin = Fp8Times(replace(H100, kernel=0.0), "block", "bf16").time(8, 8192, 8192)
    assert thin == pytest.approx((8192**2 + 8 * 8192 + 2 * 8 * 8192) / (H100.bandwidth * CONSTANTS.stream))


@pytest.mark.parametrize(
    "recompute, first_last, gradients", [("none", 0, False), ("none", 1, True), ("full", 2, False)]
)
def test_a_step_is_shorter_by_its_matmuls_and_longer_by_quantization(
    recompute: str, first_last: int, gradients: bool
) -> None:
    """Forward and input gradient of each matrix in `6 - 2 * first_last` layers, of two microbatches of 512 tokens, and
    weight gradients, whose operands are quantized a second time; the weights once."""
    options = {"fp8_first_last": first_last, "fp8_weight_gradients": gradients}
    plain = seconds(config("none", recompute=recompute), recompute=recompute)
    fp8 = seconds(config("block", recompute=recompute, **options), recompute=recompute)
    faster = 1979 / 989 * RECIPES["block"].speed
    forwards, layers, rows = 1 + (recompute == "full"), 6 - 2 * first_last, 512
    saved = moved = 0.0
    for inputs, outputs in WEIGHTS.values():
        saved += 2 * (forwards + 1 + gradients) * 2 * rows * inputs * outputs / RATE * (1 - 1 / faster)
        moved += 2 * rows * ((forwards + gradients) * inputs + (1 + gradients) * outputs) * (3 + 4 / 128)
        moved += inputs * outputs * (3 + 4 / 128) + 2 * 2 * inputs * outputs  # Hopper copies transposed codes
    assert plain - fp8 == pytest.approx(layers * (saved - moved / (H100.bandwidth * CONSTANTS.stream)))


def test_zero_3_gathers_codes_of_block_and_quantizes_for_mxfp8_at_each_use() -> None:
    """On a network so slow that only gathers count: one byte for two of the matrices' weights, in forward and backward
    of each microbatch. With `mxfp8`, the weights are quantized each time, along both dimensions."""
    slow = replace(H100, within=Link("slow", 1e6, 0.0), per_node=2)
    layout = LayoutChoice(dp=2, zero=3, micro_batch_size=2)

    def waits(fp8: str) -> float:
        return Stepper(PlannedJob.of(config(fp8, global_batch_size=8), slow)).step(layout).total

    elements = 6 * sum(inputs * outputs for inputs, outputs in WEIGHTS.values())
    assert waits("none") - waits("block") == pytest.approx(2 * 2 * elements / 2 / 1e6 / CONSTANTS.slowest, rel=1e-3)
    stepper = Stepper(PlannedJob.of(config("mxfp8"), replace(find_device("b200"), kernel=0.0)))
    alone, times = LayoutChoice(zero=0, micro_batch_size=2), stepper.fp8_times
    (size,) = stepper.stages(alone)[1]
    assert times is not None and (size.quantized, size.coded) == (elements, 0)
    moved = 2 * elements * (3 + 1 / 32)
    assert times.at_each_use(layout, size) == times.after_update(alone, [size])
    assert times.at_each_use(layout, size) == pytest.approx(moved / (8e12 * CONSTANTS.stream))
    assert times.at_each_use(alone, size) == times.after_update(layout, [size]) == 0


def test_what_keeps_the_precision_costs_as_before() -> None:
    """Parts of 96 rows are not made of whole blocks; with `mxfp8` they are."""
    model = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}
    assert seconds(config("block", model)) == seconds(config("none", model))
    assert seconds(config("mxfp8", model)) > seconds(config("none", model)), "rounded, and multiplied in bf16"


def test_codes_for_weight_gradients_are_only_in_other_codes_recipes() -> None:
    job = PlannedJob.of(config("none"), EVEN)
    layout = LayoutChoice(zero=0, micro_batch_size=2)
    times = {
        recipe: Stepper(replace(job, software=replace(job.software, fp8=recipe))).step(layout).total
        for recipe in ("none", "block", "delayed", "current")
    }
    weights = 6 * (3 + 4 / 128) * sum(inputs * outputs for inputs, outputs in WEIGHTS.values())
    after = weights / (H100.bandwidth * CONSTANTS.stream)
    assert times["block"] == pytest.approx(seconds(config("block")) - after), "their weights' codes are not counted"
    weight_gradients = 6 * 2 * sum(2 * 512 * inputs * outputs for inputs, outputs in WEIGHTS.values()) / RATE
    assert times["none"] - times["delayed"] > times["none"] - times["block"] + 0.4 * weight_gradients
    assert times["delayed"] < times["current"], "which reads each operand once more"


@pytest.mark.parametrize(
    "gpu, fp8, says",
    [
        ("h100", "block", "times as fast. The rate of fp8 matmuls is an estimate"),
        ("b200", "mxfp8", "times as fast. The rate of fp8 matmuls is an estimate"),
        ("h100", "mxfp8", "operands are rounded to fp8 and multiplied in bf16."),
        ("a100", "block", "slower. a100 has no such matmuls, so that a run is rejected unless train.kernels is torch"),
    ],
)
def test_the_effect_is_said(gpu: str, fp8: str, says: str) -> None:
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    job = PlannedJob.of(config(fp8, large, global_batch_size=64, micro_batch_size=32), find_device(gpu))
    (line,) = fp8_effect(job, LayoutChoice(zero=0, micro_batch_size=32))
    assert line.startswith(f"fp8 ({fp8}): ") and says in line
    assert fp8_effect(replace(job, fp8=NO_FP8), LayoutChoice()) == []


def test_the_effect_on_a_run_is_that_on_its_hardware() -> None:
    run = config("block", global_batch_size=64)
    assert fp8_effect_of_run(run) == [], "the dry run does not know the device"
    run = replace(run, profiling=replace(run.profiling, hardware="h100"))
    assert fp8_effect_of_run(run) == fp8_effect(PlannedJob.of(run, H100), choice_of(run))
    assert fp8_effect_of_run(replace(run, train=replace(run.train, fp8="none"))) == []
