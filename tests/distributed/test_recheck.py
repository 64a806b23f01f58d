"""Silent corruption: a flipped bit in a matmul is found and its rank named, in every layout, and nothing else is.

Each layout runs with and without `faults.recheck`. With it, a bit is flipped in a random matmul of a random rank, in
the repetition or in the step's own pass. The ends are bitwise equal: no repetition changes a number, and gradients with
a flipped bit are replaced. The data has no tokens without a loss: a bit that is flipped there may change no gradient.
"""

from __future__ import annotations

import random
import re
from dataclasses import fields
from typing import Any

import pytest

from megalite.monitoring.metrics import StepMetrics
from megalite.monitoring.rechecks import Rechecks
from megalite.optimizer.registry import STATE
from megalite.parallel.recheck.runtime import CorruptionError
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, with_fewer_rows, write_tokens
from tests.support.jobs import make_trainer
from tests.support.spaces.layouts import Case

MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 2, "masked": False, "dropout": 0.1}
SPREAD = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.02}
TENSOR: Case = {"tp": 2, "sequence_parallel": True, "microbatches": 2}
INTERLEAVED: Case = {"pp": 2, "dp": 2, "microbatches": 4, "layers": 4}
LAYOUTS: dict[str, Case] = {
    "one process": {"microbatches": 2},
    "pp 2, zb-h2": {"pp": 2, "schedule": "zb-h2", "microbatches": 4, "layers": 3},
    "dp 2, spike": {"dp": 2, "inject": "spike:rank=0,step=2,factor=3"},
    "dp 3, ZeRO-2, recomputation": {"dp": 3, "zero": 2, "microbatches": 2, "recompute": "full"},
    "tp 2, dp 2, ZeRO-1, bf16": {**TENSOR, "dp": 2, "zero": 1, "precision": "bf16", "tied": True},
    "pp 2, dp 2, zb-v, ZeRO-2": {**INTERLEAVED, "schedule": "zb-v", "zero": 2},
    "pp 2, dp 2, interleaved, ZeRO-3": {**INTERLEAVED, "schedule": "interleaved-2", "zero": 3},
    "cp 2, dp 2, ring, ZeRO-3": {"cp": 2, "dp": 2, "context": "ring", "zero": 3},
    "cp 2, Ulysses": {"cp": 2, "context": "ulysses", "microbatches": 2},
    "ep 2 in tp 2, dp 2": {**TENSOR, "dp": 2, "ep": 2, "zero": 1},
    "ep 2 in dp 4, ZeRO-2": {"dp": 4, "ep": 2, "zero": 2, "microbatches": 2},
    "ep 2 in dp 2, PowerSGD": {"dp": 2, "ep": 2, "powersgd_rank": 2},
}
STEPS, RECHECKED = 3, 2


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def configuration(layout: str, prefix: str, **faults: Any) -> tuple[int, dict[str, Any]]:
    """Number of ranks, and configuration."""
    case = {**MODEL, **LAYOUTS[layout]}
    changes = {"faults": {"inject": case.get("inject", ""), **faults}}
    config = config_of(case, prefix, case.get("precision", "fp32"), **changes)
    config["parallel"] |= {"ep": case.get("ep", 1), "powersgd_rank": case.get("powersgd_rank")}
    config["model"] |= SPREAD if "ep" in case else {}
    with_fewer_rows(config)
    return case["tp"] * case["pp"] * case["dp"] * case["cp"], config


def trained(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The end of some steps, and the ranks that were named."""
    trainer = make_trainer(context, config)
    try:
        results = [result for step in range(STEPS) for result in trainer.train_step(wait=step == STEPS - 1)]
        return {
            "losses": [result.loss for result in results],
            "norms": [result.grad_norm for result in results],
            "tensors": global_tensors(trainer, STATE),
            "reported": reported(trainer) if trainer.config.faults.recheck else {},
        }
    except CorruptionError as error:
        return {"error": str(error)}
    finally:
        trainer.close()


def reported(trainer: Trainer) -> dict[int, list[int]]:
    """The ranks with wrong values in each step, as in metrics.jsonl."""
    observer, metrics = Rechecks(trainer), dict.fromkeys((field.name for field in fields(StepMetrics)), 0)
    steps = {step: observer.numbers(StepMetrics(**metrics | {"step": step})) for step in range(1, STEPS + 1)}
    return {step: numbers["corrupt_ranks"] for step, numbers in steps.items() if numbers}


def flipped_bit(layout: str, world: int) -> tuple[int, str]:
    """A random rank, and the fault that flips a bit of it."""
    draw, case = random.Random(layout), {**MODEL, **LAYOUTS[layout]}
    fewest = 6 * (case["layers"] // case["pp"]) * case["microbatches"]  # matmuls of a pass
    rank, number, matmul = draw.randrange(world), draw.choice((1, 2)), draw.randrange(fewest)
    return rank, f"bitflip:rank={rank},step={RECHECKED},pass={number},matmul={matmul}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_found_and_its_rank_named_and_the_numbers_stay(layout, ranks, prefix):
    world, plain = configuration(layout, prefix)
    culprit, fault = flipped_bit(layout, world)
    inject = f"{plain['faults']['inject']} {fault}"
    _, config = configuration(layout, prefix, recheck=RECHECKED, on_corruption="warn", inject=inject)
    expected, got = ranks.run(world, trained, plain), ranks.run(world, trained, config)
    for rank in got:
        assert rank["reported"] == {RECHECKED: [culprit]}
        assert rank["losses"] == expected[0]["losses"] and rank["norms"] == expected[0]["norms"]
    tensors, others = got[0]["tensors"], expected[0]["tensors"]
    assert [name for name in others if not tensors[name].equal(others[name])] == []


PERMANENT = " ".join(f"bitflip:rank=1,step=2,matmul=5,pass={number}" for number in (1, 2, 3, 4))
UNDECIDED = "no further replica decides"


@pytest.mark.parametrize(
    "layout, inject, on_corruption, named, says",
    [
        ("dp 2, spike", "bitflip:rank=1,step=2,matmul=5", "stop", {1}, "and its gradients are right"),
        ("dp 2, spike", PERMANENT, "warn", {0, 1}, "but its gradients are not known"),
        ("dp 3, ZeRO-2, recomputation", PERMANENT, "warn", {1}, "but its gradients are not known"),
    ],
)
def test_a_run_ends_on_all_ranks(layout, inject, on_corruption, named, says, ranks, prefix):
    world, config = configuration(layout, prefix, recheck=2, on_corruption=on_corruption, inject=inject)
    errors = [rank["error"] for rank in ranks.run(world, trained, config)]
    assert set(errors) == {errors[0]} and errors[0].startswith("silent corruption in step 2: ")
    first, *others = errors[0].splitlines()
    assert {int(rank) for rank in re.findall(r"rank (\d+) \(host ", first)} == named
    assert any(says in line for line in others) and (UNDECIDED in errors[0]) == (len(named) > 1)
