"""Plans of mixtures of experts: their time next to the bytes that are sent, their memory next to the estimate, and the
search over ep."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from megalite.commands.plan import main
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.families.presets import preset
from megalite.planner.cost.expert_exchange import describe_worst_load, worst_expert_bytes, worst_rows
from megalite.planner.cost.operations import Software
from megalite.planner.hardware import links
from megalite.planner.hardware.devices import Link, find_device
from megalite.planner.hardware.links import Fabric, Group
from megalite.planner.search.best_first import Search
from megalite.planner.search.run_config import apply_layout
from megalite.planner.time.step import LayoutChoice, PlannedJob, Stepper
from megalite.planner.time.traffic import traffic

MIXTRAL, H100 = ModelConfig(**preset("mixtral-8x7b")), find_device("h100")
CHOICES = [
    LayoutChoice(dp=8, ep=8),
    LayoutChoice(dp=8, ep=2, zero=3, recompute="full"),
    LayoutChoice(dp=8, ep=2, zero=2, expert_dispatch="all_gather"),
    LayoutChoice(dp=8, ep=4, recompute="experts"),
    LayoutChoice(dp=8, ep=2, expert_dispatch="all_gather", recompute="experts"),
    LayoutChoice(dp=8, ep=2, zero=3, dp_shard=4),
    LayoutChoice(tp=2, dp=4, ep=4, sequence_parallel=True, recompute="full"),
    LayoutChoice(cp=2, context="gather", dp=4, ep=4, zero=3),
    LayoutChoice(cp=2, context="ulysses", tp=2, dp=2, ep=4, sequence_parallel=True, expert_dispatch="all_gather"),
]
SMALL = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    **{"max_position_embeddings": 64, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
}


def base(batch: int = 32, model: object = None, length: int = 4096) -> Config:
    return from_dict(
        {
            "model": model or preset("mixtral-8x7b"),
            "data": {"sequence_length": length},
            "train": {"global_batch_size": batch, "precision": "bf16"},
        }
    )


@pytest.mark.parametrize(
    "choice", [*CHOICES, LayoutChoice(pp=2, dp=4, ep=4, schedule="zb-v", virtual_stages=2)], ids=str
)
def test_a_step_adds_up_and_is_bounded(choice):
    stepper = Stepper(PlannedJob(MIXTRAL, H100, 4096, 32))
    step = stepper.step(choice)
    assert sum(step.parts().values()) == pytest.approx(step.total) and min(step.parts().values()) >= -1e-9
    assert (
        stepper.divided(choice)
        <= stepper.filled(replace(choice, offload="none"))
        <= stepper.least(choice)
        <= step.total * (1 + 1e-9)
    )
    assert (step.experts > 0) == (choice.ep > 1)
    assert 0.05 < stepper.job.mfu(choice, step.total)[0] < H100.sustained


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_is_waited_for_are_the_bytes_that_are_sent(monkeypatch, choice):
    """Where nothing is hidden and no hop takes time, communication is what `traffic` counts: also of ZeRO, whose
    experts have their own ranks."""
    monkeypatch.setattr(links, "START", 0.0)
    link = Link("plain", 100e9, 0.0)
    device = replace(H100, within=link, between=link, cpu=True)  # whose communication runs beside nothing
    software = Software(hides_tensor=False, hides_gradients=False)
    step = Stepper(PlannedJob(MIXTRAL, device, 4096, 32, software=software)).step(choice)
    (sent,) = traffic(apply_layout(base(), choice), 8)
    assert step.experts * 100e9 == pytest.approx(sent.ep, rel=0.01, abs=1)
    assert step.tensor * 100e9 == pytest.approx(sent.tp, rel=0.01, abs=1)
    assert step.context * 100e9 == pytest.approx(sent.cp, rel=0.01, abs=1)
    assert (step.gradients + step.weights) * 100e9 == pytest.approx(sent.dp, rel=0.01)


def test_the_documented_bytes_of_experts():
    """As docs/topology.md writes them, for 4 sequences of 4,096 tokens on a rank, 2 experts a token and 32 mixtures."""
    (sent,) = traffic(apply_layout(base(), LayoutChoice(dp=8, ep=8)), 8)
    assert sent.ep == pytest.approx(4 * 32 * (4 * 4096) * 4096 * 2 * 2 * 7 / 8, rel=0.001)


def test_an_exchange_across_nodes_takes_each_ranks_card():
    """16 ranks on two nodes: half of a rank's rows leave the node. 2 of 8 experts for each of 4,096 tokens, there and
    back."""
    fabric, rows = Fabric(H100), 2 * 4096 * 4096 * 2
    one, two = (fabric.all_to_all(rows, Group(size, 8, nodes)) for size, nodes in ((8, 1), (16, 2)))
    assert one == pytest.approx(rows * 7 / 8 / H100.within.bandwidth, rel=0.2)
    assert two == pytest.approx(rows * 8 / 16 / H100.between.bandwidth, rel=0.2)
    steps = [Stepper(PlannedJob(MIXTRAL, H100, 4096, 64)).step(LayoutChoice(dp=64, ep=ep)) for ep in (2, 8)]
    assert 0 < steps[0].experts < steps[1].experts < 0.5 * steps[1].total


def test_rows_of_narrow_experts_take_longer_than_those_of_wide_ones():
    """As many FLOPs: but 64 experts of a token's eighth of the width have tiles of few rows."""
    wide = replace(MIXTRAL, num_experts=8, num_experts_per_tok=1, moe_intermediate_size=14336)
    narrow = replace(MIXTRAL, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=14336 // 8)
    steps = [
        Stepper(PlannedJob(model, H100, 4096, 8)).step(LayoutChoice(dp=8, ep=8)).compute for model in (wide, narrow)
    ]
    assert 1.0 < steps[1] / steps[0] < 1.6


@cache
def search(**fixed: int | str) -> Search:
    """A small mixture on four devices, of which two are a node, that hold some of its layouts."""
    device = replace(H100, memory=3.2e6 / 0.93, per_node=2)
    example = base(8, SMALL, 64)
    chosen = {"recompute": "none", "offload": "none", "schedule": "1f1b", "micro_batch_size": 1, "cp": 1} | fixed
    return Search(PlannedJob(example.model, device, 64, 8), example, 4, chosen, wanted=1)


def test_the_search_finds_what_trying_everything_finds():
    planner_search = search()
    every = [planner_search.plan(choice) for core in planner_search.cores() for choice in planner_search.variants(core)]
    fitting = [plan for plan in every if plan.fits]
    assert {plan.choice.ep for plan in every} == {1, 2, 4} and 0 < len(fitting) < len(every)
    assert {plan.choice.expert_dispatch for plan in every if plan.choice.ep == 2} == {"all_to_all", "all_gather"}
    (best,) = planner_search.plans()
    assert best.step.total == pytest.approx(min(plan.step.total for plan in fitting))
    for plan in every:
        assert planner_search.bounds.memory(plan.choice) <= plan.memory.total * 1.02, plan.choice


def test_plans_are_in_order_of_the_time_with_what_they_recompute():
    """Also where the best recomputation, decided with messages in memory, takes longer than the one with which a layout
    was first timed."""
    example, fixed = (
        base(4096, preset("qwen3-235b-a22b")),
        {"ep": 4, "expert_dispatch": "all_gather", "offload": "none", "zero": 1},
    )
    plans = Search(
        PlannedJob(example.model, H100, 4096, 4096), example, 1024, {**fixed, "micro_batch_size": 1, "cp": 1}, wanted=2
    ).plans()
    assert plans[0].step.total <= plans[1].step.total


def test_fixed_sizes_stay():
    plans = search(ep=4, expert_dispatch="all_gather").plans()
    assert [(plan.choice.ep, plan.choice.expert_dispatch) for plan in plans] == [(4, "all_gather")]


def test_the_worst_imbalance_is_counted_for_what_is_in_flight():
    """Two stages of 1f1b: the first holds two microbatches, each of one or two mixtures (layer 0 is dense); recomputed,
    one at a time."""
    kept = search(ep=2, pp=2)
    choice = LayoutChoice(pp=2, dp=2, ep=2)
    one = worst_expert_bytes(apply_layout(kept.base, choice))
    assert kept.imbalance(choice) == 2 * one
    assert kept.imbalance(replace(choice, recompute="full")) == one
    assert kept.imbalance(LayoutChoice(dp=4, ep=4)) == 3 * worst_expert_bytes(
        apply_layout(kept.base, LayoutChoice(dp=4, ep=4))
    )


@pytest.mark.parametrize(
    ("ep", "tp", "cp", "factor"), [(2, 1, 1, 1.1), (4, 1, 1, 1.0), (2, 2, 1, 1.5), (2, 2, 2, 1.0), (4, 1, 2, 0.5)]
)
def test_a_capacity_limits_what_all_tokens_make_of_one_rank(ep, tp, cp, factor):
    """Counted: each token of an expert group chooses those of the first rank's experts that have the most room left for
    its sequence."""
    length, k, experts = 48, SMALL["num_experts_per_tok"], SMALL["num_experts"]
    choice = LayoutChoice(tp=tp, cp=cp, dp=8 // (tp * cp), ep=ep, sequence_parallel=tp > 1, context="gather")
    config = apply_layout(base(8, SMALL | {"expert_capacity_factor": factor}, length), choice)
    part = length // (tp * cp)  # tokens of a rank
    room = {sequence: [math.ceil(factor * length * k / experts)] * (experts // ep) for sequence in range(8)}
    rows = 0
    for rank in range(ep):
        for _ in range(part):
            left = room[rank // (tp * cp)]
            for expert in sorted(range(len(left)), key=left.__getitem__)[-k:]:
                rows += left[expert] > 0
                left[expert] -= left[expert] > 0
    assert worst_rows(config) == pytest.approx(rows / (part * k))
    dropless = replace(config, model=replace(config.model, expert_capacity_factor=None))
    assert worst_rows(config) <= worst_rows(dropless) == ep and worst_expert_bytes(config) <= worst_expert_bytes(
        dropless
    )
    assert f"within model.expert_capacity_factor = {factor:g}, it computes" in describe_worst_load(config)


def test_the_tool_explains_a_mixture(capsys):
    sizes = ["--gpus", "64", "--gpu", "h100", "--sequence_length", "4096", "--global_batch_size", "256", "--plans", "2"]
    main(
        [
            "--model",
            "mixtral-8x7b",
            *sizes,
            "--pp",
            "1",
            "--offload",
            "none",
            "--cp",
            "1",
            "--zero",
            "1",
            "--recompute",
            "none",
        ]
    )
    text = capsys.readouterr().out
    assert text.startswith("46,702,792,704 parameters (12,879,925,248 active per token) on 64 × ")
    assert "for equally loaded experts" in text and "sending tokens to their experts" in text
    with pytest.raises(SystemExit):
        main(["--model", "mixtral-8x7b", *sizes, "--ep", "3"])
    assert "parallel.ep = 3 does not divide model.num_experts = 8" in capsys.readouterr().err
