"""ZeRO: what each stage shards, what that saves, and that it changes no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.optimizer.registry import STATE
from megalite.training.memory_report import ModelStates, formula, measured
from tests.support import jobs
from tests.support.configs import SINGLE, config_of, config_of_one_process, write_tokens
from tests.support.jobs import make_trainer
from tests.support.spaces.layouts import Case, world

STEPS = 2
MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 5, "masked": True, "dropout": 0.1}
SHARDED: dict[str, Case] = {
    "dp 2": {"dp": 2, "microbatches": 4},
    "dp 3": {"dp": 3, "microbatches": 2},
    "dp 4, tied": {"dp": 4, "microbatches": 2, "tied": True},
    "pp 2, dp 2, tied": {"pp": 2, "dp": 2, "microbatches": 4, "tied": True},
    "tp 2, pp 2, dp 2": {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4, "sequence_parallel": True, "kv_heads": 1},
    "dp 4 in groups of 2": {"dp": 4, "microbatches": 2, "dp_shard": 2},
    "tp 2, dp 4 in groups of 2, tied": {"tp": 2, "dp": 4, "microbatches": 2, "dp_shard": 2, "tied": True},
    "zb-h2 on pp 2, dp 2": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zb-h2"},
    "zb-v on pp 2, dp 2, tied": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zb-v", "tied": True},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def run(ranks, prefix: str, case: Case, precision: str = "fp32", **changes: Any) -> list[dict[str, Any]]:
    config = config_of(case, prefix, precision)
    config["train"] |= changes
    config["parallel"]["dp_shard"] = case.get("dp_shard")
    return ranks.run(world(case), jobs.train, config, STEPS, STATE)


STAGES: dict[str, tuple[int, ...]] = {
    **{"dp 2": (3,), "dp 3": (1, 2, 3), "dp 4, tied": (2,), "pp 2, dp 2, tied": (3,), "tp 2, pp 2, dp 2": (1, 2)},
    **{"dp 4 in groups of 2": (1, 2, 3), "tp 2, dp 4 in groups of 2, tied": (2, 3)},
    **{"zb-h2 on pp 2, dp 2": (2, 3), "zb-v on pp 2, dp 2, tied": (2, 3)},
}
"""The stages that run on a layout: all in groups, which test_equivalence.py lacks. Its table has every stage with every
other option, but no moments."""


@pytest.mark.parametrize(("layout", "zero"), [(name, zero) for name, stages in STAGES.items() for zero in stages])
def test_is_one_process(layout, zero, ranks, references, prefix):
    case = {**MODEL, **SHARDED[layout], "zero": zero, "precision": "fp64"}
    got = run(ranks, prefix, case, "fp64")
    alone = references.run(jobs.train, config_of_one_process(case, prefix), STEPS, STATE)
    assert all(rank["losses"] == pytest.approx(alone["losses"], rel=1e-9) for rank in got)
    assert all(rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-9) for rank in got)
    for name, value in got[0]["tensors"].items():
        assert (value - alone["tensors"][name]).abs().max() <= 1e-9, name


@pytest.mark.parametrize("layout", ["dp 2", "dp 4, tied", "tp 2, pp 2, dp 2"])
def test_stages_are_bitwise_equal_with_one_microbatch(layout, ranks, prefix):
    """With more, stage 2 adds the ranks of each microbatch before it adds microbatches: another order."""
    one, *others = [
        run(ranks, prefix, {**MODEL, **SHARDED[layout], "microbatches": 1, "zero": zero})[0] for zero in (1, 2, 3)
    ]
    for other in others:
        assert one["losses"] == other["losses"]
        assert all(torch.equal(value, other["tensors"][name]) for name, value in one["tensors"].items())


def model_state_bytes(context: Any, config: dict[str, Any]) -> tuple[ModelStates, ModelStates, int]:
    """What a rank keeps between steps, what it should, and the parameters of the model."""
    trainer = make_trainer(context, config)
    trainer.step()
    trainer.close()
    return measured(trainer), formula(trainer), trainer.parameters


FORMULAS = {  # g: bytes of a gradient
    0: lambda n, g: 2 + g + 12,
    1: lambda n, g: 2 + g + 12 / n,
    2: lambda n, g: 2 + (g + 12) / n,
    3: lambda n, g: (2 + g + 12) / n,
}
CASES = [
    *((0, 2, "fp32"), (1, 3, "fp32"), (2, 4, "fp32"), (3, 8, "fp32")),
    *((0, 2, "bf16"), (1, 2, "bf16"), (2, 3, "bf16"), (3, 2, "bf16")),
]


@pytest.mark.parametrize("zero, size, grad_dtype", CASES)
def test_bytes_per_parameter_are_those_of_the_formula(zero, size, grad_dtype, ranks, prefix):
    """bf16: weights of 2 bytes, fp32 master weights and moments, gradients of 4 or 2; a model of 5 million
    parameters."""
    case = {**MODEL, "dp": size, "zero": zero}
    config = config_of(case, prefix, "bf16")
    config["model"] |= {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 7, "num_attention_heads": 8}
    config["train"] |= {"global_batch_size": size, "micro_batch_size": 1, "grad_dtype": grad_dtype}
    for states, expected, parameters in ranks.run(size, model_state_bytes, config):
        assert 5e6 < parameters < 6e6
        assert sum(states) / parameters == pytest.approx(
            FORMULAS[zero](size, 2 if grad_dtype == "bf16" else 4), rel=0.02
        )
        assert states == expected


def test_fp32_keeps_no_separate_master(ranks, prefix):
    config = config_of({**MODEL, "dp": 2, "zero": 1}, prefix, "fp32")
    config["model"] |= {"hidden_size": 128, "intermediate_size": 384}
    states, _, parameters = ranks.run(2, model_state_bytes, config)[0]
    assert [each / parameters for each in states] == pytest.approx([4, 4, 8 / 2, 0], rel=0.02)


def gathering_of_a_step(context: Any, config: dict[str, Any]) -> tuple[int, int]:
    """How many gatherings one step (not the first) does, and the most buckets that were whole at once."""
    trainer = make_trainer(context, config)
    gatherer, most = trainer.store.gatherer, 0
    assert gatherer is not None
    acquire = gatherer.acquire

    def counted(unit: int) -> None:
        nonlocal most
        acquire(unit)
        most = max(most, sum(memory.resident for memory in trainer.store.buckets))

    gatherer.acquire = counted  # type: ignore[method-assign]
    trainer.step()
    trainer.mesh.traffic.clear()
    trainer.step()
    trainer.close()
    return trainer.mesh.traffic["all_gather", "data"], most


@pytest.mark.parametrize("reshard", ["action", "step"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_weights_are_gathered_as_often_as_planned(reshard, schedule, ranks, prefix):
    """A unit is a bucket here. Per use: each microbatch walks up the units and down again, without the embedding; the
    head is used twice in a row and gathered once. Per step: each unit once."""
    layers, microbatches = 5, 4
    config = config_of(
        {**MODEL, "layers": layers, "dp": 2, "zero": 3, "microbatches": microbatches, "schedule": schedule}, prefix
    )
    config["parallel"] |= {"zero3_reshard": reshard, "bucket_mb": 1e-6}
    gathered, most = ranks.run(2, gathering_of_a_step, config)[0]
    units = layers + 2
    assert (gathered, most) == ((microbatches * (2 * units - 2), 2) if reshard == "action" else (units, units))


def test_freeing_late_or_early_is_the_same(ranks, prefix):
    case = {**MODEL, **SHARDED["pp 2, dp 2, tied"], "zero": 3}
    results = []
    for reshard in ("action", "step"):
        config = config_of(case, prefix, "bf16")
        config["parallel"]["zero3_reshard"] = reshard
        results.append(ranks.run(4, jobs.train, config, STEPS, STATE)[0])
    assert results[0]["losses"] == results[1]["losses"]
    assert all(torch.equal(value, results[1]["tensors"][name]) for name, value in results[0]["tensors"].items())


@pytest.mark.parametrize("zero", [0, 2])
def test_bf16_gradients_follow_fp32_ones(zero, ranks, prefix):
    """They lose digits with each microbatch that is added, not more."""
    case = {**MODEL, "dp": 2, "zero": zero, "microbatches": 4}
    wide, narrow = (run(ranks, prefix, case, "bf16", grad_dtype=dtype)[0] for dtype in ("fp32", "bf16"))
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=1e-3)
    assert (
        narrow["grad_norms"] == pytest.approx(wide["grad_norms"], rel=2e-2)
        and narrow["grad_norms"] != wide["grad_norms"]
    )
