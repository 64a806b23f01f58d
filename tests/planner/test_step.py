"""The planner's time: formulas by hand, limits that no prediction may pass, and speeds that others have published."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import held_out, published
from megalite.config.load import from_dict
from megalite.config.sections.lora import LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.muon import MuonConfig
from megalite.families.presets import preset
from megalite.model.cost.flops import per_token
from megalite.model.cost.records import attended_pairs
from megalite.parallel.pipeline.generator import SCHEDULES, build, chunks_of
from megalite.parallel.pipeline.simulator import simulate
from megalite.planner.cost.context_exchange import Rows
from megalite.planner.cost.operations import Software
from megalite.planner.hardware import links
from megalite.planner.hardware.constants import ALIKE, CONSTANTS, INTERVAL
from megalite.planner.hardware.devices import Device, HardwareError, Link, find_device, known_devices, read_device
from megalite.planner.hardware.kernels import TILE_START, attention, computed_pairs, matmul, stream
from megalite.planner.hardware.links import START, Fabric, Group, group
from megalite.planner.report.explanation import binding, selected_rows, uneven_parts
from megalite.planner.search.best_first import Search
from megalite.planner.search.bounds import LayoutBounds
from megalite.planner.search.run_config import apply_layout
from megalite.planner.time.schedule_time import Durations, PipelineShape, pace
from megalite.planner.time.step import LayoutChoice, PlannedJob, Stepper, StepTime
from megalite.planner.time.traffic import traffic

A100 = find_device("a100")
PLAIN = replace(A100, within=Link("fast", 200e9, 1e-6), between=Link("slow", 20e9, 10e-6), kernel=0.0)
GB = 1e9


# --- devices
# -------------------------------------------------------------------------------------------------------------------


def test_every_device_of_the_table_is_complete_and_dense():
    for name in known_devices():
        device = find_device(name)
        peak = max(device.peaks.values())
        assert 1e14 < peak < 3e15, "sparse peaks are twice as high as any dense one"
        assert all(value == pytest.approx(2 * device.peak("bf16"), rel=0.02) for value in device.fp8.values())
        assert device.between.bandwidth <= device.within.bandwidth * 2 and device.memory > 16e9 and device.price
    assert "bf16" not in find_device("v100-32gb").peaks
    assert find_device("h100").peak("bf16") == 989e12 and find_device("h100").within.bandwidth == pytest.approx(
        0.8 * 450e9 * CONSTANTS.links
    )


def test_a_device_of_ones_own(tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text(
        "tflops: {bf16: 100}\nsustained: 0.5\nmultiprocessors: 10\nmemory_gib: 8\nmemory_gbs: 100\nwithin: {gbs: 10, "
        "latency_us: 2}\n"
        "between: ib200\ngpus_per_node: 2\nhost: pcie4\nproducts: {100: 1, 9: 3, 20: 2}\n"
    )
    device = find_device(str(own))
    assert (device.name, device.peak("bf16"), device.within) == ("mine", 1e14, Link("measured", 10e9, 2e-6))
    assert device.rates == ((9.0, 3e9), (20.0, 2e9), (100.0, 1e9)), "ascending, as numbers"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"memory_gbs": None}, "missing key memory_gbs"),
        ({"speed": 1}, "unknown key 'speed'"),
        ({"sustained": "fast"}, "wrong type"),
        ({"within": "nvlink9"}, "Unknown link 'nvlink9'. Legal values: nvlink"),
        ({"tflops": None}, "is not in peaks.yaml"),
        ({"gpus_per_node": 0}, "gpus_per_node must be positive"),
        ({"within": {"gbs": -1, "latency_us": 0}}, "gbs must be positive"),
    ],
)
def test_what_is_wrong_with_a_device_is_said(change, message):
    row = {
        "tflops": {"bf16": 1},
        "sustained": 0.5,
        "multiprocessors": 1,
        "memory_gib": 8,
        "memory_gbs": 1,
        "within": "pcie4",
    }
    row |= {"between": "ib200", "gpus_per_node": 2, "host": "pcie4"} | change
    with pytest.raises(HardwareError, match=message):
        read_device("mine", {key: value for key, value in row.items() if value is not None})


# --- kernels
# -------------------------------------------------------------------------------------------------------------------


def test_a_large_product_reaches_what_is_sustained_and_a_thin_one_its_bytes():
    large = 2 * 16384**3 / matmul(A100, 16384, 16384, 16384, "bf16")
    assert 0.93 < large / (312e12 * A100.sustained) <= 1
    thin = matmul(PLAIN, 8, 8192, 8192, "bf16")
    assert thin == pytest.approx(2 * (8192 * 8192 + 2 * 8 * 8192) / (2039e9 * A100.constants.stream))


def test_tiles_come_in_waves():
    """108 tiles of 128 x 256 are one wave; one more column makes a second one, unless smaller tiles do better."""
    unit = 312e12 * A100.sustained / 108
    wave = 2 * 128 * 256 * 8192 / unit
    full, spill = matmul(PLAIN, 128 * 9, 256 * 12, 8192, "bf16"), matmul(PLAIN, 128 * 9, 256 * 12 + 1, 8192, "bf16")
    assert full == pytest.approx(wave + TILE_START)
    assert 1.03 * full < spill <= 2 * full


def test_a_gradient_that_is_accumulated_moves_more():
    plain, added = (matmul(PLAIN, 4096, 4096, 16, "bf16", written=written) for written in (None, 8.0))
    assert added - plain == pytest.approx(6 * 4096**2 / (2039e9 * A100.constants.stream))


def test_measured_products_replace_tiles():
    device = replace(PLAIN, rates=((64.0, 1e9), (256.0, 3e9)), measured=True)
    assert matmul(device, 128, 128, 128, "bf16") == pytest.approx(2 * 128**3 / 2e9), (
        "half way between, in the logarithm"
    )
    assert matmul(device, 8, 8, 8, "bf16") == pytest.approx(2 * 8**3 / 1e9)


def test_attention_counts_blocks_below_the_diagonal():
    assert attended_pairs(4, None) == 10 and attended_pairs(4, 2) == 7
    assert computed_pairs(1024, None) == sum(128 * 128 * (row + 1) for row in range(8))
    forward, backward = attention(A100, 32, 128, 8192, 1, None, "bf16")
    speed = 4 * 32 * 128 * computed_pairs(8192, None) / forward
    assert 0.5 < speed / 312e12 < 0.75 and 2.5 < backward / forward < 3.2  # FlashAttention-2 on A100: 0.6 to 0.7


# --- links
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, stride, expected",
    [
        (8, 1, Group(8, 8, 1)),
        (4, 2, Group(4, 4, 1)),
        (16, 1, Group(16, 8, 2)),
        (16, 8, Group(16, 1, 16)),
        (64, 2, Group(64, 4, 16)),
        (3, 4, Group(3, 1, 3)),
    ],
)
def test_where_a_group_lies(size, stride, expected):
    assert group(A100, size, stride) == expected


def test_groups_that_lie_across_the_ends_of_nodes_have_the_network_between_them():
    """Nodes of 8: of three neighbours some are ranks 6 to 8; of six, 6 to 11, two on one node. In a world of 6 nobody
    leaves the node."""
    assert (
        group(A100, 3, 1, 24) == Group(3, 1, 3)
        and group(A100, 6, 1, 24) == Group(6, 2, 3)
        and group(A100, 3, 2, 24) == Group(3, 1, 3)
    )
    assert group(A100, 6, 1, 6) == Group(6, 6, 1) and group(A100, 4, 2, 24) == Group(4, 4, 1)


def test_rings_by_hand():
    fabric, inside = Fabric(PLAIN), Group(4, 4, 1)
    assert fabric.half(GB, inside) == pytest.approx(START + 3 / 4 * GB / 200e9 + 3e-6)
    assert fabric.all_reduce(GB, inside) == pytest.approx(START + 2 * 3 / 4 * GB / 200e9 + 6e-6)
    across = Group(16, 8, 2)  # eight cards: 160 GB/s; 14 hops inside, two between
    assert fabric.half(GB, across) == pytest.approx(START + 15 / 16 * (GB / 160e9 + 14 * 1e-6 + 2 * 10e-6))
    assert fabric.half(GB, Group(2, 1, 2)) == pytest.approx(START + 1 / 2 * (GB / 20e9 + 20e-6))
    assert fabric.half(GB, Group(1, 1, 1)) == fabric.all_reduce(GB, Group(1, 1, 1)) == 0
    assert fabric.send(GB, 8) == pytest.approx(START + 1e-6 + GB / 200e9)
    assert fabric.send(GB, 16) == pytest.approx(START + 10e-6 + GB / 20e9)


def test_trees_carry_small_sums_over_many_nodes():
    fabric, ranks = Fabric(PLAIN), Group(1024, 1, 1024)
    assert fabric.all_reduce(64, ranks) == pytest.approx(START + 2 * (64 / 20e9 + 10 * 10e-6))
    assert fabric.all_reduce(100 * GB, ranks) < 2 * 100 * GB / 20e9 + 0.03, "and rings the large ones"


# --- the pipeline's pace
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_continuing_the_steady_state_is_simulating_the_whole(name):
    """Also where the ends are heavier, where every stage differs, and where messages make waves as long as the
    pipeline."""
    draw = random.Random(name)
    for ranks, microbatches, message in ((2, 61, 0.3), (4, 70, 0.05), (3, 54, 0.0)):
        stages = None if name != "interleaved" else 3
        count = ranks * (stages or chunks_of(name))
        forward, backward, weight = (
            [scale * draw.uniform(0.9, 1.1) for _ in range(count)] for scale in (1.0, 1.2, 0.8)
        )
        durations = (forward, backward, weight) if ranks != 3 else ([1.0] * count,) * 3
        timeline = pace(PipelineShape(name, ranks, microbatches, stages), Durations(*durations, message))
        whole = simulate(build(name, ranks, microbatches, stages), *durations, message)
        assert timeline.makespan == pytest.approx(whole.makespan, rel=1e-9)
        assert timeline.longest_span == pytest.approx(whole.longest_span, rel=1e-9)
        assert timeline.bubble_fraction == pytest.approx(whole.bubble_fraction, rel=1e-6, abs=1e-9)
        assert timeline.busy == pytest.approx(whole.busy, rel=1e-9)
        assert timeline.starts == pytest.approx([spans[0].start for spans in whole.spans], rel=1e-9)
        assert timeline.ends == pytest.approx(
            [whole.makespan - spans[-1].end for spans in whole.spans], rel=1e-9, abs=1e-9
        )


# --- steps
# ----------------------------------------------------------------------------------------------------------------------

LLAMA = ModelConfig(**preset("llama-3-8b"))
CHOICES = [
    LayoutChoice(dp=16),
    LayoutChoice(dp=16, zero=3, recompute="full"),
    LayoutChoice(tp=8, dp=2, sequence_parallel=True),
    LayoutChoice(tp=2, pp=4, dp=2, zero=0),
    LayoutChoice(tp=2, dp=2, cp=4, context="ring", zero=3),
    LayoutChoice(dp=16, zero=1, dp_shard=8),
    LayoutChoice(tp=2, dp=8, zero=3, dp_shard=4, recompute="full"),
    LayoutChoice(tp=4, pp=4, schedule="interleaved", virtual_stages=4, sequence_parallel=True, recompute="every-2"),
    LayoutChoice(pp=8, dp=2, schedule="zb-h1", zero=2),
    LayoutChoice(pp=8, dp=2, schedule="zb-v", virtual_stages=2, offload="cpu"),
]


def seconds(choice: LayoutChoice, device: Device = A100, **job: object) -> float:
    return Stepper(PlannedJob(LLAMA, device, 4096, 128, **job)).step(choice).total  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_step_adds_up_is_bounded_and_never_slower_on_better_hardware(choice):
    stepper = Stepper(PlannedJob(LLAMA, A100, 4096, 128))
    step = stepper.step(choice)
    assert sum(step.parts().values()) == pytest.approx(step.total) and min(step.parts().values()) >= -1e-9
    assert (
        stepper.divided(choice)
        <= stepper.filled(replace(choice, offload="none"))
        <= stepper.least(choice)
        <= step.total * (1 + 1e-9)
    )
    faster = (
        replace(A100, bandwidth=2 * A100.bandwidth),
        replace(A100, within=replace(A100.within, bandwidth=2 * A100.within.bandwidth)),
        replace(A100, between=replace(A100.between, bandwidth=2 * A100.between.bandwidth)),
        replace(A100, peaks={"bf16": 2 * A100.peak("bf16")}),
    )
    assert all(seconds(choice, device) <= step.total * (1 + 1e-9) for device in faster)
    palm, causal = stepper.job.mfu(choice, step.total)
    assert 0.05 < causal < palm < A100.sustained


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_takes_no_less_than_its_bound(name):
    """Whatever the number of microbatches, also where the last stage is heavier. That of 1f1b is close."""
    base = from_dict({"model": asdict(LLAMA), "data": {"sequence_length": 4096}, "train": {"global_batch_size": 8}})
    for pp, microbatches, zero, recompute in (
        (4, 4, 1, "none"),
        (4, 13, 2, "full"),
        (8, 24, 1, "every-3"),
        (8, 37, 3, "none"),
    ):
        job = PlannedJob(replace(LLAMA, vocab_size=512_000), A100, 4096, 2 * microbatches)
        free = name == "interleaved"
        if free and microbatches % pp:
            continue
        choice = LayoutChoice(
            pp=pp, dp=2, zero=zero, schedule=name, virtual_stages=2 if free else chunks_of(name), recompute=recompute
        )
        bounds = LayoutBounds(base, Stepper(job))
        predicted, step = bounds.time(choice), bounds.stepper.step(choice)
        assert max(bounds.stepper.least(choice), bounds.alone(choice)) <= predicted <= step.total * (1 + 1e-9)
        assert predicted > 0.93 * (step.total - step.gradients - step.weights) or name != "1f1b"


@pytest.mark.parametrize("changes", [{"optimistic_step": False}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("schedule, virtual", [("zb-h2", 1), ("zb-v", 2)])
def test_a_step_that_waits_for_the_norm_ends_with_the_last_rank(schedule, virtual, changes):
    """Without the barrier a step takes the longest rank's time from its first pass to its last."""
    job = PlannedJob(ModelConfig(**preset("llama-3-8b")), find_device("h100"), 4096, 16)
    choice = LayoutChoice(pp=8, dp=1, schedule=schedule, virtual_stages=virtual)
    waits, runs_on = Stepper(replace(job, **changes)), Stepper(job)
    assert waits.step(choice).total > 1.02 * runs_on.step(choice).total
    assert all(each.least(choice) <= each.step(choice).total * (1 + 1e-9) for each in (waits, runs_on))


def test_what_each_choice_costs():
    base = LayoutChoice(tp=4, dp=4, sequence_parallel=True)
    longer = [replace(base, recompute=mode) for mode in ("none", "every-4", "every-2", "full")]
    assert all(seconds(a) < seconds(b) for a, b in pairwise(longer))
    assert (
        seconds(LayoutChoice(dp=16, zero=1))
        < seconds(LayoutChoice(dp=16, zero=2))
        < seconds(LayoutChoice(dp=16, zero=3))
    )
    assert seconds(base) < seconds(replace(base, offload="cpu")) < seconds(replace(base, offload="disk"))
    slow = replace(A100, between=replace(A100.between, bandwidth=A100.between.bandwidth / 8))
    whole, shared = (seconds(LayoutChoice(dp=16, zero=3, dp_shard=shard), slow) for shard in (None, 8))
    assert shared < 0.7 * whole, "weights stay in the node, and gradients leave it once a step"
    pipelines = [
        LayoutChoice(pp=8, dp=2),
        LayoutChoice(pp=8, dp=2, schedule="interleaved", virtual_stages=2),
        LayoutChoice(pp=8, dp=2, schedule="zb-h2"),
    ]
    assert seconds(pipelines[0]) > seconds(pipelines[1]) > seconds(pipelines[2])
    assert seconds(LayoutChoice(tp=16)) > 1.3 * seconds(LayoutChoice(tp=8, dp=2)), "tp across nodes"


def test_where_rows_hold_documents_ranks_wait_for_the_slowest():
    for context in ("gather", "ring"):
        choice = LayoutChoice(tp=2, cp=8, context=context)
        whole, zigzag = (seconds(choice, rows=Rows(documents)) for documents in (False, True))
        assert whole <= seconds(replace(choice, context_parts="balanced"), rows=Rows(True)) < zigzag
    assert seconds(LayoutChoice(tp=2, cp=8), rows=Rows(True)) == seconds(LayoutChoice(tp=2, cp=8)), "ulysses"


LONG = {"max_position_embeddings": 131072}


def long_search(**fixed: int | str) -> Search:
    """Long rows of documents on two nodes."""
    sizes = {
        "data": {"sequence_length": 131072, "reset_positions": True},
        "train": {"global_batch_size": 16, "precision": "bf16"},
    }
    base = from_dict({"model": preset("llama-3-8b") | LONG, **sizes})
    return Search(
        PlannedJob(base.model, A100, 131072, 16, rows=Rows.of(base)),
        base,
        16,
        {"pp": 1, "micro_batch_size": 1, **fixed},
        1,
    )


@pytest.mark.parametrize(
    ("fixed", "methods"),
    [
        ({"context_parts": "zigzag"}, {("gather", 1, "zigzag")}),
        ({}, {("ring", 1, "balanced"), ("ring", 2, "balanced")}),
    ],
)
def test_a_ring_between_nodes_is_considered_only_where_it_is_balanced(fixed, methods):
    """Over all ranks, and with the two ranks that share a node exchanging heads."""
    search = long_search(tp=4, cp=4, recompute="none", **fixed)
    methods_listed = {(choice.context, choice.context_inner, choice.context_parts) for choice in search.cores()}
    assert methods_listed == {("ulysses", 1, "zigzag"), *methods}


def test_parts_that_documents_make_unequal_are_balanced_and_said():
    """Inside a node keys and values are gathered; balanced parts take two thirds of the time of attention."""
    search = long_search(tp=1, cp=8, context="gather", recompute="full", zero=3, offload="none")
    (plan,) = search.plans()
    assert (
        plan.choice.context_parts == "balanced"
        and apply_layout(search.base, plan.choice).parallel.context_parts == "balanced"
    )
    assert plan.step.total < 0.8 * search.plan(replace(plan.choice, context_parts="zigzag")).step.total
    (said,) = uneven_parts(search, plan)
    assert "1.50 times" in said and "parallel.context_parts: balanced makes it 1.00" in said
    assert uneven_parts(search, replace(plan, choice=replace(plan.choice, context="ulysses"))) == []


def test_one_device_is_its_kernels_and_its_optimizer():
    step = Stepper(PlannedJob(LLAMA, A100, 4096, 4)).step(LayoutChoice())
    assert (step.bubble, step.tensor, step.gradients, step.weights, step.recompute) == (0, 0, 0, 0, 0)
    assert step.optimizer == pytest.approx(stream(A100, 34 * 8.03e9), rel=0.01)


def test_the_host_limits_layers_of_short_kernels_only():
    """A layer's 120 operations, of 4 microbatches and 32 layers. Kernels of 4,096 tokens of an 8B model hide them."""
    narrow = replace(LLAMA, hidden_size=512, intermediate_size=1024)
    ours, other = (
        Stepper(PlannedJob(narrow, A100, 128, 4, software=Software(host=host))).step(LayoutChoice()).total
        for host in (1.0, 3.0)
    )
    assert other - ours == pytest.approx(4 * 32 * 120 * 2 * A100.host_time)
    assert seconds(LayoutChoice(), software=Software(host=3.0)) == seconds(LayoutChoice())


@pytest.mark.parametrize("gpus, nodes", [(1, 1), (8, 1), (16, 2), (20, 3), (512, 64)])
def test_nodes_wait_for_the_latest_of_them(gpus, nodes):
    """At the same work for each GPU: ln n times the mean delay."""
    stepper = Stepper(PlannedJob(LLAMA, A100, 4096, gpus))
    step = stepper.step(LayoutChoice(dp=gpus))
    assert step.nodes == pytest.approx(A100.constants.delay * math.log(nodes))
    punctual = replace(A100, constants=replace(CONSTANTS, delay=0.0))
    other = Stepper(PlannedJob(LLAMA, punctual, 4096, gpus))
    assert step.total - other.step(LayoutChoice(dp=gpus)).total == pytest.approx(step.nodes)
    assert stepper.least(LayoutChoice(dp=gpus)) - other.least(LayoutChoice(dp=gpus)) == pytest.approx(step.nodes), (
        "a lower bound has it too"
    )


def test_muon_adds_its_iterations_which_ranks_share():
    """Per iteration of m × n with m ≤ n: two products of 2 m² n, and one of 2 m³."""
    shapes = [(4096, 4096), (4096, 4096), (1024, 4096), (1024, 4096), *[(4096, 14336)] * 3]
    flops = 32 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in shapes)

    def added(choice: LayoutChoice) -> float:
        one, other = (
            Stepper(PlannedJob(LLAMA, A100, 4096, 128, muon=muon)).step(choice) for muon in (MuonConfig(), None)
        )
        assert one.total - other.total == pytest.approx(one.optimizer - other.optimizer)
        return one.optimizer - other.optimizer

    assert flops / A100.peak("bf16") < added(LayoutChoice()) < 2 * flops / A100.peak("bf16")
    assert added(LayoutChoice()) / 16 <= added(LayoutChoice(dp=16)) < added(LayoutChoice()) / 4
    assert added(LayoutChoice(dp=8, pp=2)) < added(LayoutChoice(dp=8))


WAITING = [
    LayoutChoice(tp=4, dp=2),
    LayoutChoice(dp=8, dp_shard=4),
    LayoutChoice(tp=4, dp=2, sequence_parallel=True),
    LayoutChoice(tp=2, dp=4, zero=0),
    LayoutChoice(tp=2, cp=4),
    LayoutChoice(tp=2, dp=2, cp=2, context="gather"),
]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("rank, fp8", [(0, "none"), (16, "none"), (0, "block")])
@pytest.mark.parametrize("choice", WAITING, ids=str)
def test_what_is_waited_for_are_the_bytes_that_are_sent(monkeypatch, choice, recompute, rank, fp8):
    """Where nothing is hidden and no hop takes time, communication is what `traffic` counts along specs, buckets and
    schedule."""
    monkeypatch.setattr(links, "START", 0.0)
    link = Link("plain", 100e9, 0.0)
    device = replace(A100, within=link, between=link)
    choice = replace(choice, recompute=recompute)
    software = Software(hides_tensor=False, hides_gradients=False)
    sizes = {"data": {"sequence_length": 4096}, "train": {"global_batch_size": 32, "precision": "bf16"}}
    sizes["train"]["fp8"] = fp8
    base = from_dict({"model": preset("llama-3-8b"), "lora": {"rank": rank}, **sizes})
    step = Stepper(replace(PlannedJob.of(base, device), software=software)).step(choice)
    (sent,) = traffic(apply_layout(base, choice), 8)
    assert step.tensor * 100e9 == pytest.approx(sent.tp, rel=0.01)
    assert step.context * 100e9 == pytest.approx(sent.cp, rel=0.01)
    assert (step.gradients + step.weights) * 100e9 == pytest.approx(sent.dp, rel=0.01)


@pytest.mark.parametrize("rank", [0, 64])
def test_adapters_take_the_time_of_their_flops(rank):
    """Where only products take time and none depends on its shape, a step is its training FLOPs over the rate."""
    lora = LoraConfig(rank=rank)
    fast = replace(A100.constants, attention=1e9, slowest=1.0)
    device = replace(A100, bandwidth=1e30, kernel=0.0, host_time=0.0, rates=((1.0, 1e14),), constants=fast)
    step = Stepper(PlannedJob(LLAMA, device, 512, 8, lora=lora)).step(LayoutChoice(micro_batch_size=8))
    flops = per_token(LLAMA, 512, lora=lora)
    assert step.total * 1e14 == pytest.approx(8 * 512 * (flops.layers + flops.head), rel=0.02)


@pytest.mark.parametrize(
    "model, lora, each_layer",
    [
        # of two blocks, forward and backward
        (replace(LLAMA, residual_dropout=0.1), LoraConfig(rank=0), 2 * 2 * LLAMA.hidden_size),
        # of q|k|v, out, gate|up, down
        (LLAMA, LoraConfig(rank=8, dropout=0.1), 3 * (3 * LLAMA.hidden_size + LLAMA.intermediate_size)),
    ],
)
def test_dropout_reads_and_writes_each_value_once(model, lora, each_layer):
    """16-bit values of 4,096 tokens; what adapters drop is dropped again for their weight gradients."""
    device = replace(A100, kernel=0.0, host_time=0.0)
    jobs = (
        PlannedJob(LLAMA, device, 512, 8, lora=replace(lora, dropout=0.0)),
        PlannedJob(model, device, 512, 8, lora=lora),
    )
    without, dropped = (Stepper(job).step(LayoutChoice(micro_batch_size=8)).total for job in jobs)
    moved = 2 * 2 * 8 * 512 * each_layer * LLAMA.num_hidden_layers
    assert dropped - without == pytest.approx(stream(device, moved), rel=1e-6)


def test_factors_read_and_write_the_queries_and_not_the_output():
    device, narrow = replace(A100, kernel=0.0, host_time=0.0), replace(LLAMA, value_head_dim=LLAMA.head_size // 2)
    models = narrow, replace(narrow, query_scale_beta=0.1, query_scale_positions=256)
    jobs = (PlannedJob(model, device, 512, 8) for model in models)
    without, scaled = (Stepper(job).step(LayoutChoice(micro_batch_size=8)).total for job in jobs)
    values = LLAMA.num_attention_heads * LLAMA.head_size * LLAMA.num_hidden_layers
    assert scaled - without == pytest.approx(stream(device, 2 * 4 * 8 * 512 * values), rel=1e-6)


# --- published speeds
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables():
    return {table.key: table for table in published.compare()}


@pytest.fixture(scope="module")
def apart():
    return published.apart()


def test_published_speeds_are_met(tables):
    for key, table in tables.items():
        assert table.median <= 0.10 and abs(table.worst) <= 0.25, key


def test_the_page_and_the_constants_are_those_of_the_fit():
    content = json.loads(held_out.RESULTS.read_text())
    for text, page in (
        (held_out.document(content), published.PAGE),
        (held_out.overview(content), held_out.PLANNER_PAGE),
    ):
        assert text in page.read_text(), "run python -m benchmarks.held_out"
    assert published.fitted() == pytest.approx(content["constants"]["all"], rel=0.02)
    assert [math.exp(content[name]) - 1 for name in ("interval", "alike")] == pytest.approx(
        [INTERVAL, ALIKE], abs=0.006
    )


def test_tables_are_predicted_by_constants_fitted_without_them():
    content = json.loads(held_out.RESULTS.read_text())
    deviations = [abs(row["deviation"]) for table in content["tables"].values() for row in table["rows"]]
    inside = [each for table in content["tables"].values() for each in held_out.covered(table)]
    assert median(deviations) <= 0.08 and sum(value <= 0.2 for value in deviations) >= 0.9 * len(deviations)
    assert 0.7 <= sum(inside) / len(inside) <= 0.9
    for key in ("torchtitan-h100", "fms-h100", "mpt-a100"):
        values = content["constants"]["without"][key]
        (table,) = published.compare(values, [key])
        assert [row.deviation for row in table.rows] == pytest.approx(
            [row["deviation"] for row in content["tables"][key]["rows"]]
        )


def test_a_fit_moves_only_what_the_other_tables_determine():
    """Tables a and b depend on one constant each; the other two are as published. Without b, its constant stays near
    its source."""
    fit = object.__new__(held_out.Fit)
    fit.at = dict.fromkeys("xy", 1.0)
    fit.prior = {name: {"start": 1.0, "spread": 0.5} for name in "xy"}
    fit.keys, fit.deviations = ["a", "a", "b"], np.log([1.1, 1.1, 0.8])
    fit.slopes, fit.weights = np.array([[1.0, 0], [1, 0], [0, 1]]), np.full(3, 1 / held_out.NOISE)
    assert fit.without(()) == pytest.approx({"x": 1 / 1.1, "y": 1 / 0.8}, rel=0.01)
    assert fit.without({"b"}) == pytest.approx({"x": 1 / 1.1, "y": 1.0}, rel=0.01)


def test_a_share_counts_each_group_alike():
    assert (
        held_out.quantile([[1.0] * 90, [2.0], [3.0]], 0.6) == 2.0 and held_out.quantile([[5.0, 1.0, 3.0]], 0.5) == 3.0
    )


def test_published_runs_in_fp8_are_met_by_constants_that_are_not_fitted_to_them(apart):
    tree = published.read_published()
    deviations = [
        abs(compared.deviation)
        for table in apart
        for row, compared in zip(published.rows_of(tree["apart"][table.key]), table.rows, strict=True)
        if "fp8" in tree["software"][row["software"]]
    ]
    assert len(deviations) == 71 and median(deviations) <= 0.06 and max(deviations) <= 0.27


def test_the_page_shows_what_is_predicted(tables, apart):
    page = published.PAGE.read_text()
    assert published.document([*tables.values(), *apart]) in page, "run python -m benchmarks.published"


@pytest.mark.parametrize(
    "part, seconds, says",
    [
        (
            "experts",
            0.1,
            "Sending tokens to their experts costs most after computation: a smaller ep, or one inside a node, would "
            "help most.",
        ),
        (
            "bubble",
            2.0,
            "The pipeline bubble is the bottleneck: more microbatches, more stages per rank or a smaller pp would help "
            "most.",
        ),
        ("tensor", 0.01, "Computation is the bottleneck: everything else is small, and only a faster device"),
    ],
)
def test_only_what_takes_the_longest_is_called_the_bottleneck(part, seconds, says):
    nothing = dict.fromkeys(
        ("recompute", "tensor", "bubble", "gradients", "weights", "optimizer", "bubble_fraction"), 0.0
    )
    step = StepTime(**{**nothing, "total": 1 + seconds, "compute": 1.0, part: seconds})
    assert binding(SimpleNamespace(step=step)).startswith(says)


def test_attention_to_selected_rows_is_said_beside_dense_attention():
    """GLM-5 on rows of 32,768: 78 layers with 64 heads of 256 and 256 channels, of which a token sees 16,384.5 rows in
    the mean and selects 1,984.0; an indexer scores the former with 32 heads of 128."""
    model = preset("glm-5") | {"vocab_size": 1000}
    base = from_dict({"model": model, "data": {"sequence_length": 32768}})
    assert selected_rows(PlannedJob.of(base, find_device("h100"))) == [
        "Attention to selected rows takes 40.9 GFLOP per token, indexers included; "
        "dense attention would take 251 GFLOP."
    ]
    dense = from_dict({"model": preset("deepseek-v3"), "data": {"sequence_length": 32768}})
    assert selected_rows(PlannedJob.of(dense, find_device("h100"))) == []
