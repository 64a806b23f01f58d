"""Recomputation by budget: the integer programme against trying everything, and its decisions against the other modes
in the model."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog

from megalite.assembly import plan
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.recompute import OPERATIONS, mode_of, problem, written
from megalite.config.schema import Config
from megalite.model.cost.recomputed import groups
from megalite.parallel.pipeline.generator import placement
from megalite.planner.budget import integer_program
from megalite.planner.budget.decision import CPU, bytes_of, decide, problem_of, recompute_within, resolved, table
from megalite.planner.budget.integer_program import ItemGroup, Option, Relaxation, solve
from megalite.planner.cost.operations import Operations
from megalite.planner.hardware.devices import find, read_device
from megalite.planner.memory.activations import Activations
from megalite.planner.memory.estimate import estimate
from megalite.planner.memory.states import Device
from tests.support import jobs_memory
from tests.support.pool import RankContext

COSTS = {"cuda": find("h100"), "cpu": read_device("cpu", dict(CPU))}
MODES = ("none", "selective", "full", "every-2", "every-3")
MODEL = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128},
}


# ---- the integer programme


def drawn_programme(seed: int) -> tuple[list[ItemGroup], list[int]]:
    draw = random.Random(seed)
    constraints = draw.randint(1, 3)
    kinds = []
    for _ in range(draw.randint(1, 4)):
        size, options = draw.randint(1, 9), []
        for _ in range(draw.randint(1, 3)):
            frees = tuple(size * draw.randint(0, 5) for _ in range(constraints))
            options.append(Option(draw.choice([0.0, 1.0, 1.5, 2.0, 3.7]) * draw.randint(1, 4), frees))
        kinds.append(ItemGroup(draw.randint(1, 3), tuple(options)))
    most = [sum(kind.items * max(each.frees[i] for each in kind.options) for kind in kinds) for i in range(constraints)]
    return kinds, [draw.randint(-2, top + 1) for top in most]


def cost_of(kinds: list[ItemGroup], counts: Any) -> float:
    return sum(
        count * option.cost
        for kind, own in zip(kinds, counts, strict=True)
        for count, option in zip(own, kind.options, strict=True)
    )


def frees(kinds: list[ItemGroup], counts: Any, index: int) -> int:
    return sum(
        count * option.frees[index]
        for kind, own in zip(kinds, counts, strict=True)
        for count, option in zip(own, kind.options, strict=True)
    )


@pytest.mark.parametrize("seed", range(150))
def test_the_programme_is_solved_as_by_trying_everything(seed):
    kinds, needs = drawn_programme(seed)
    each = [
        [taken for taken in product(range(kind.items + 1), repeat=len(kind.options)) if sum(taken) <= kind.items]
        for kind in kinds
    ]
    enough = [
        counts for counts in product(*each) if all(frees(kinds, counts, i) >= need for i, need in enumerate(needs))
    ]
    solution = solve(kinds, needs)
    assert (solution is None) == (not enough)
    if solution is not None:
        assert solution in enough
        assert cost_of(kinds, solution) == pytest.approx(min(cost_of(kinds, counts) for counts in enough))
    for i, need in enumerate(needs):
        alone = [
            ItemGroup(kind.items, tuple(Option(each.cost, (each.frees[i],)) for each in kind.options)) for kind in kinds
        ]
        assert Relaxation(alone).least(need) <= (float("inf") if solution is None else cost_of(kinds, solution) + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_a_large_programme_is_solved_to_within_the_gap(seed, monkeypatch, capfd):
    """HiGHS, which takes programmes with many kinds and constraints, beside following all partial choices. It prints
    nothing."""
    kinds, needs = drawn_programme(seed)
    best = solve(kinds, needs)
    monkeypatch.setattr(integer_program, "MOST_FOLLOWED", 0)
    solution = solve(kinds, needs)
    assert (solution is None) == (best is None)
    if solution is not None:
        assert all(frees(kinds, solution, i) >= need for i, need in enumerate(needs))
        assert all(sum(own) <= kind.items for kind, own in zip(kinds, solution, strict=True))
        assert cost_of(kinds, solution) <= cost_of(kinds, best) * (1 + integer_program.GAP) + 1e-9
    assert capfd.readouterr() == ("", "")


def test_hundreds_of_nearly_equal_kinds_and_constraints_are_solved():
    """Forty stages of a rank, each with a layer of three groups, in flight for nearly as many microbatches at each of
    forty loads."""
    draw, stages = random.Random(1), 40
    held = [[50 - abs(stage - load) // 2 for load in range(stages)] for stage in range(stages)]
    sizes = [(draw.choice((7, 8)), draw.choice((16, 17)), draw.choice((30, 31))) for _ in range(stages)]
    kinds = [
        ItemGroup(1, (Option(size * 1.1, tuple(size * m for m in held[i])),))
        for i, each in enumerate(sizes)
        for size in each
    ]
    needs = [sum(kind.options[0].frees[load] for kind in kinds) * 2 // 5 for load in range(stages)]
    solution = solve(kinds, needs)
    assert all(frees(kinds, solution, load) >= need for load, need in enumerate(needs))
    costs, freed = ([getattr(kind.options[0], name) for kind in kinds] for name in ("cost", "frees"))
    relaxed = linprog(costs, A_ub=-np.array(freed).T, b_ub=-np.array(needs), bounds=(0, 1))
    assert relaxed.fun * (1 - 1e-9) <= cost_of(kinds, solution) <= 1.02 * relaxed.fun


# ---- decisions


def tree(
    *, model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **parallel: Any
) -> dict[str, dict[str, Any]]:
    return {
        "model": {**MODEL, **(model or {})},
        "parallel": {"dp": 1, "bucket_mb": 0.02, **parallel},
        "data": {"sequence_length": 80},
        "train": {"global_batch_size": 8 * parallel.get("dp", 1), "micro_batch_size": 2, **(train or {})},
    }


def drawn(seed: int) -> tuple[Config, Device]:
    """A random small run."""
    draw = random.Random(seed)
    heads = draw.choice((2, 4))
    model = {
        **{
            "num_attention_heads": heads,
            "num_key_value_heads": draw.choice((1, 2)),
            "hidden_size": heads * draw.choice((8, 16)),
        },
        **{"intermediate_size": draw.choice((24, 64, 160)), "num_hidden_layers": draw.randint(4, 9)},
        **{"norm_placement": draw.choice(("pre", "pre", "both", "post")), "gated_mlp": draw.random() < 0.7},
        **draw.choice(
            (
                {},
                {"sliding_window": 16, "sliding_window_layers": [0, 2]},
                {"norm": "layer"},
                {"parallel_block": "two_norms"},
            )
        ),
    }
    pp = draw.choice((1, 1, 2, 2))
    tp = draw.choice((1, 1, 2))
    parallel = {"pp": pp, "tp": tp, "sequence_parallel": tp > 1 and draw.random() < 0.5}
    if pp > 1:
        parallel["schedule"] = draw.choice(("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"))
    train = {"precision": draw.choice(("fp32", "bf16"))}
    if parallel.get("schedule") in ("interleaved", "zb-v"):
        model["num_hidden_layers"] = max(4, model["num_hidden_layers"])
    return from_dict(tree(model=model, train=train, **parallel)), draw.choice(("cuda", "cpu"))


def with_mode(config: Config, recompute: str) -> Config:
    return replace(config, train=replace(config.train, recompute=recompute))


def seconds(config: Config, device: Device) -> list[float]:
    """Recomputation of each pipeline rank per microbatch, in the planner's model."""
    operations = Operations(COSTS[device], config.model, config.train.precision)
    share = Activations(config, device).share
    own, units = (
        placement(config.parallel.schedule, config.parallel.pp, config.parallel.virtual_stages),
        plan.units_of(config),
    )
    sums = [0.0] * config.parallel.pp
    for stage, numbers in units.items():
        layers = [number - 1 for number in numbers if 0 < number <= config.model.num_hidden_layers]
        sums[own[stage]] += sum(
            sum(operations.again(share, layer, mode_of(config.train.recompute, layer))) for layer in layers
        )
    return sums


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_is_never_worse_than_a_mode_that_fits_in_it(seed):
    """With the memory of any other mode as the budget, every rank recomputes at most as long as under that mode, and
    none needs more."""
    config, device = drawn(seed)
    world = config.parallel.pp * config.parallel.tp
    for mode in MODES:
        other = with_mode(config, mode)
        budget = max(rank.total for rank in estimate(other, world, device))
        chosen = with_mode(config, decide(config, budget, world, device).recompute)
        assert max(rank.total for rank in estimate(chosen, world, device)) <= budget
        least, taken = seconds(other, device), seconds(chosen, device)
        assert all(a <= b * (1 + 1e-9) + 1e-15 for a, b in zip(taken, least, strict=True)), (
            mode,
            chosen.train.recompute,
        )


def test_no_choice_of_operations_is_faster_and_fits():
    """Against every combination of operations of two layers."""
    config = from_dict(
        tree(model={"num_hidden_layers": 2, "parallel_block": "shared_norm"}, train={"precision": "bf16"})
    )
    each = [
        ["", *("+".join(operation.names) for operation in group)]
        for group in groups(Activations(config, "cuda").units, 0)
    ]
    modes = ["+".join(filter(None, names)) or "none" for names in product(*each)]
    assert len(modes) == 16
    every = []
    for chosen in product(modes, repeat=2):
        other = with_mode(config, written(list(chosen)))
        every.append((estimate(other, 1)[0].total, seconds(other, "cuda")[0]))
    least, most = min(total for total, _ in every), max(total for total, _ in every)
    for part in range(11):
        budget = least + part * (most - least) // 10
        decided = with_mode(config, decide(config, budget).recompute)
        assert estimate(decided, 1)[0].total <= budget
        assert seconds(decided, "cuda")[0] <= min(time for total, time in every if total <= budget) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_search_takes_what_a_run_decides(schedule):
    """For all ranks, and for the first one alone, whose decision does not depend on the other."""
    config = from_dict(tree(pp=2, schedule=schedule, train={"precision": "bf16"}))
    microbatches = ParallelDims.of(config).microbatches
    posed = problem_of(config, 2, "cuda", COSTS["cuda"], plan.schedule(config, microbatches), {})
    tops = [max(rank.total for rank in estimate(with_mode(config, mode), 2)) for mode in ("none", "full")]
    for budget in (tops[0], sum(tops) // 2, tops[1]):
        decided = decide(config, budget, 2, costs=COSTS["cuda"])
        assert recompute_within(posed, budget) == decided.recompute
        own = decided.ranks[0].modes
        expected = written([own.get(layer, "none") for layer in range(config.model.num_hidden_layers)])
        assert recompute_within(posed, budget, ranks=[0]) == expected
    assert recompute_within(posed, tops[1] // 2) is None


def test_a_budget_that_is_too_small_names_the_smallest_one():
    config = from_dict(tree(pp=2, train={"recompute": "budget", "memory_budget": 1e5}))
    with pytest.raises(ConfigError) as caught:
        resolved(config, "cpu")
    message = str(caught.value)
    assert "train.memory_budget = 100KB" in message and "pipeline rank 0" in message and "pipeline rank 1" in message
    least = message.partition("Legal values: from ")[2].partition(". ")[0]
    from megalite.config.values import amount_value

    config.train.memory_budget = amount_value("train.memory_budget", least, "")
    resolved_config = resolved(config, "cpu")
    assert max(rank.total for rank in estimate(resolved_config, 2, "cpu")) <= config.train.memory_budget
    config.train.memory_budget *= 0.998
    with pytest.raises(ConfigError):
        resolved(config, "cpu")


def test_a_share_is_one_of_the_device():
    config = from_dict(tree(train={"recompute": "budget", "memory_budget": 0.5}))
    assert bytes_of(config, 3e9) == 1_500_000_000
    with pytest.raises(ConfigError, match="profiling.hardware"):
        bytes_of(config)
    config.profiling.hardware = "h100"
    assert bytes_of(config) == 40 * 2**30


def test_a_table_says_what_each_stage_recomputes():
    config = from_dict(tree(pp=2, train={"global_batch_size": 16}))
    tops = [max(rank.total for rank in estimate(with_mode(config, mode), 2, "cpu")) for mode in ("none", "full")]
    decision = decide(config, sum(tops) // 2, device="cpu")
    lines = table(decision)
    assert [rank.total <= decision.budget for rank in decision.ranks] == [True, True]
    assert "layers" in lines[1] and len(lines) >= 4 and any(name in " ".join(lines) for name in OPERATIONS)
    assert [rank.nothing for rank in decision.ranks] == [
        rank.total for rank in estimate(with_mode(config, "none"), 2, "cpu")
    ]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("attn_norm+mlp_in", None),
        ("2*attn_norm,none,full", None),
        ("budget", None),
        ("every-0", "mode"),
        ("mlp_inn", "mode"),
        ("2*mlp_in,none", "list of 3"),
    ],
)
def test_modes_that_are_written(value, why):
    reason = problem(value, 4)
    assert (reason is None) if why is None else (reason is not None and why in reason)


# ---- memory, measured


WIDE = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 1000, "num_hidden_layers": 6}


@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 0.75, 0.95])
def test_the_peak_within_a_budget_is_what_the_allocator_gives(part):
    """At five budgets, between that of everything recomputed and that of nothing."""
    config = from_dict(tree(model=WIDE, train={"micro_batch_size": 4}))
    whole = decide(config, 1 << 40, device="cpu").ranks[0]
    budget = int(whole.everything + part * (whole.nothing - whole.everything))
    recompute = decide(config, budget, device="cpu").recompute
    options = tree(model=WIDE, train={"micro_batch_size": 4, "recompute": recompute})
    (planned,) = estimate(from_dict(options), 1, "cpu")
    allocated = jobs_memory.most_allocated(RankContext(0, 1), options)
    assert planned.total <= budget
    assert planned.states.device + allocated == pytest.approx(planned.total, rel=0.05)
