"""LoRA: every layout trains the adapters that one process trains, on the same frozen weights, and keeps no other
optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import jobs_training
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs_training import train_with_initial_weights
from tests.support.spaces.layouts import Case

STEPS, BATCH = 4, 32
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
MODEL: Case = {**SINGLE, "tied": True, "kv_heads": 1, "vocab_size": 101, "layers": 4, "masked": True, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "tp 2, replicated keys": {"tp": 2, "microbatches": 2},
    "tp 2, sequence parallel, zb-h1": {
        "tp": 2,
        "schedule": "zb-h1",
        "sequence_parallel": True,
        "microbatches": 2,
        "recompute": "every-2",
    },
    "pp 2, zb-v": {"pp": 2, "schedule": "zb-v", "microbatches": 4},
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3, "microbatches": 2, "recompute": "full"},
    "tp 2, pp 2, sequence parallel, interleaved": {
        **{
            "tp": 2,
            "pp": 2,
            "sequence_parallel": True,
            "schedule": "interleaved-2",
            "microbatches": 4,
            "recompute": "selective",
        }
    },
    "pp 2, dp 2, ZeRO-3, offloaded": {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2, "offload": "cpu"},
}
VARIANT = {
    **{"dora": True, "scaling": "rslora", "ranks": {"k": 2, "down": 3}, "alphas": {"v": 5.0}},
    **{"modules_to_save": ["embedding", "norms"]},
}
VARIANT_LAYOUTS: dict[str, Case] = {
    "tp 2, sequence parallel, replicated keys": {
        "tp": 2,
        "sequence_parallel": True,
        "microbatches": 2,
        "recompute": "full",
    },
    "tp 2, pp 2, zb-h1": {"tp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 4},
    "pp 2, dp 2, ZeRO-3": {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"], count=3000)


def configuration(case: Case, prefix: str, precision: str = "fp64", **lora: Any) -> dict[str, Any]:
    config = config_of(
        {**MODEL, **case}, prefix, precision, lora=LORA | lora, optimizer={"lr": 3e-3 if precision == "fp64" else 3e-4}
    )
    config["parallel"]["zero3_reshard"] = "step" if case.get("pp", 1) > 1 else "action"
    return config


@pytest.fixture(scope="module")
def single(references, prefix):
    """The run of one process in each precision."""
    return lambda precision: references.run(train_with_initial_weights, configuration({}, prefix, precision), STEPS)


@pytest.fixture(scope="module")
def single_variant(references, prefix):
    return references.run(train_with_initial_weights, configuration({}, prefix, **VARIANT), STEPS - 1)


@pytest.mark.parametrize("layout", VARIANT_LAYOUTS)
def test_every_variant_trains_like_one_process(layout, ranks, prefix, single_variant):
    """DoRA's row lengths, which span the tp ranks of a row-parallel weight; ranks and alphas of their own; modules
    trained in full."""
    case = {**MODEL, **VARIANT_LAYOUTS[layout]}
    config = configuration(VARIANT_LAYOUTS[layout], prefix, **VARIANT)
    got = ranks.run(case["tp"] * case["pp"] * case["dp"], train_with_initial_weights, config, STEPS - 1)
    for rank in got:
        assert rank["losses"] == pytest.approx(single_variant["losses"], rel=1e-9, abs=0)
        assert rank["grad_norms"] == pytest.approx(single_variant["grad_norms"], rel=1e-9, abs=0)
    before, after = got[0]["before"], got[0]["tensors"]
    assert after.keys() == single_variant["tensors"].keys()
    for name, value in after.items():
        assert (value - single_variant["tensors"][name]).abs().max() <= 1e-9, name
        trained = any(part in name for part in ("lora", "norm", "embedding"))
        assert torch.equal(value, before[name]) is not trained, name
    assert after["weight/layers.0.mlp.down.lora_a"].shape == (3, 48)
    assert after["weight/layers.0.attention.k.lora_b"].shape[1] == 2


@pytest.mark.parametrize(
    ("layout", "precision"), [*((layout, "fp64") for layout in LAYOUTS), ("tp 2, sequence parallel, zb-h1", "fp32")]
)
def test_trains_like_one_process(layout, precision, ranks, prefix, single):
    case, expected = {**MODEL, **LAYOUTS[layout]}, single(precision)
    relative, absolute = (1e-9, 1e-9) if precision == "fp64" else (1e-5, 2e-5)
    config = configuration(LAYOUTS[layout], prefix, precision)
    got = ranks.run(case["tp"] * case["pp"] * case["dp"], train_with_initial_weights, config, STEPS)
    for rank in got:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=relative, abs=0)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=relative, abs=0)
    before, after = got[0]["before"], got[0]["tensors"]
    assert after.keys() == expected["tensors"].keys()
    for name, value in after.items():
        assert (value - expected["tensors"][name]).abs().max() <= absolute, name
        assert torch.equal(value, before[name]) is not ("lora" in name), f"{name}: only adapters are trained"


def test_dropout_is_on_the_adapters_alone_and_makes_a_difference(ranks, prefix, single):
    without = ranks.run(1, train_with_initial_weights, configuration({}, prefix, dropout=0.0), 2)[0]["losses"]
    assert without[0] == single("fp64")["losses"][0], "B starts at zero: what A reads does not show"
    assert without[1] != single("fp64")["losses"][1]


def test_targets_choose_projections(ranks, prefix):
    got = ranks.run(1, train_with_initial_weights, configuration({}, prefix, targets=["q", "v", "down"]), 2)[0]
    trained = {name for name, value in got["tensors"].items() if not torch.equal(value, got["before"][name])}
    assert trained == {
        f"weight/layers.{layer}.{part}.lora_{half}"
        for layer in range(4)
        for part in ("attention.q", "attention.v", "mlp.down")
        for half in "ab"
    }


@pytest.mark.parametrize("zero", [1, 3])
def test_optimizer_state_is_that_of_the_adapters_alone(zero, ranks, prefix):
    """The numbers by hand: hidden size 32, 2 of 4 heads' width for keys, 48 inner channels, 4 layers, rank 4."""
    adapters = 4 * 4 * sum((32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 48, 32 + 48, 48 + 32))
    frozen = 2 * 104 * 32 + 32 + 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32)
    case: Case = {"dp": 2, "zero": zero, "tied": False, "kv_heads": 2, "microbatches": 2}
    config = configuration(case, prefix, "bf16")
    config["parallel"]["bucket_mb"] = 25
    for measured, expected in ranks.run(2, jobs_training.model_states, config):
        assert measured == expected, "what is measured is what is planned"
        assert measured.optimizer == adapters * 12 / 2
        assert measured.gradients == adapters * 4 / (2 if zero == 3 else 1)
        assert measured.weights == pytest.approx((adapters + frozen) * 2 / (2 if zero == 3 else 1), rel=0.01), (
            "buckets are filled up"
        )


def test_resumes_bitwise_and_refuses_other_adapters(ranks, prefix, tmp_path):
    case: Case = {"dp": 2, "zero": 3, "microbatches": 2}
    config = configuration(case, prefix, "bf16", dora=True)
    config["run"] = {"dir": str(tmp_path), "name": "saved"}
    expected = ranks.run(2, jobs_training.train_and_save, config, 2, 2)[0]
    assert {name.split("/")[1] for name in expected["tensors"] if name.startswith("exp_avg/")} == {
        name.removeprefix("weight/") for name in expected["tensors"] if "lora" in name and name.startswith("weight/")
    }
    config["checkpoint"]["load"] = expected["directory"]
    for got in ranks.run(2, jobs_training.resume, config, 2):
        assert got["losses"] == expected["losses"][2:]
        assert all(torch.equal(value, expected["tensors"][name]) for name, value in got["tensors"].items())
    config["lora"] |= {"alpha": 4.0, "dora": False}
    assert "lora.alpha was 8.0, is 4.0; lora.dora was True, is False" in ranks.run(2, jobs_training.refusal, config)[0]
