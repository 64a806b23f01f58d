"""A quantized base (`lora.base`): every layout has the values that others find for the whole matrix, trains the
adapters that one process trains, and resumes on another layout; memory and traffic are those that are planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import jobs_quantized, jobs_training
from tests.support.bits_and_bytes import by_others
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.layouts import Case

STEPS = 3
MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 4, "masked": True, "dropout": 0.0}
ODD = {"hidden_size": 33, "intermediate_size": 66, "num_attention_heads": 4, "head_dim": 8}
"""Rows of an odd number of elements, which share bytes, and blocks across rows and parts."""
WHOLE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
"""Rows and parts of whole blocks."""
CUT = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4}
"""Rows of whole blocks of 32, which parts cut."""
LAYOUTS: dict[str, tuple[Case, dict[str, Any], dict[str, Any]]] = {
    "tp 2": ({"tp": 2}, ODD, {}),
    "tp 2, double": ({"tp": 2, "sequence_parallel": True}, ODD | {"hidden_size": 34}, {"double_quant": True}),
    "tp 4, replicated keys": ({"tp": 4, "microbatches": 2}, WHOLE, {}),
    "pp 2, zb-h1, dp 2, ZeRO-3": ({"pp": 2, "schedule": "zb-h1", "dp": 2, "zero": 3, "microbatches": 2}, ODD, {}),
    "tp 2, dp 2, ZeRO-3, double, recomputed": (
        {"tp": 2, "dp": 2, "zero": 3, "microbatches": 2, "recompute": "full"},
        ODD,
        {"double_quant": True, "start": "loftq"},
    ),
    "fp4, dp 4, ZeRO-3, offloaded parameters": (
        {"dp": 4, "zero": 3, "offload": "cpu"},
        WHOLE,
        {"base": "fp4", "double_quant": True},
    ),
    "fp4, tp 2, pp 2, recomputed": (
        {"tp": 2, "pp": 2, "microbatches": 2, "recompute": "full"},
        ODD,
        {"base": "fp4", "scaling": "rslora"},
    ),
    "int8, tp 2, pp 2": ({"tp": 2, "pp": 2, "microbatches": 2}, ODD, {"base": "int8"}),
    "int8, dp 2, ZeRO-3": ({"dp": 2, "zero": 3}, ODD, {"base": "int8"}),
    "mxfp4, tp 4": ({"tp": 4, "microbatches": 2}, CUT, {"base": "mxfp4"}),
    "mxfp4, tp 2, dp 2, ZeRO-3": ({"tp": 2, "dp": 2, "zero": 3}, CUT, {"base": "mxfp4", "dora": True}),
    "ep 2, tp 2, ZeRO-3, experts": (
        {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3, "microbatches": 2},
        ODD | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 33},
        {"targets": ["q", "experts.in", "experts.down"], "double_quant": True, "start": "loftq"},
    ),
    "tp 2, pp 2, interleaved, DoRA": (
        {"tp": 2, "pp": 2, "schedule": "interleaved-2", "microbatches": 4, "recompute": "selective"},
        ODD,
        {"dora": True, "scaling": "rslora", "modules_to_save": ["norms"]},
    ),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"], count=3000)


def configuration(case: Case, prefix: str, shape: dict[str, Any], precision: str = "fp64", **lora: Any) -> Any:
    lora = {"rank": 4, "alpha": 8.0, "base": "nf4"} | lora
    config = config_of({**MODEL, **case}, prefix, precision, model=shape, lora=lora, optimizer={"lr": 3e-3})
    if "num_experts" in shape and world(case) > 1:
        config["parallel"]["ep"] = 2
    if "offload" in case:
        config["parallel"]["offload_parameters"] = True
    return config


def world(case: Case) -> int:
    size = {**MODEL, **case}
    return size["tp"] * size["pp"] * size["dp"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_values_of_the_whole_matrix_and_trains_like_one_process(layout, ranks, references, prefix):
    case, shape, lora = LAYOUTS[layout]
    plain = configuration(
        {}, prefix, shape, "fp32", **(lora | {"base": "none", "double_quant": False, "start": "default"})
    )
    matrices = references.run(jobs_training.train_with_initial_weights, plain, 0)["before"]
    config = configuration(case, prefix, shape, **lora)
    seen = dict[str, Tensor]()
    for values in ranks.run(world(case), jobs_quantized.values, config):
        for name, ((row, column), own) in values.items():
            whole = seen.get(name)
            if whole is None:
                form = lora.get("base", "nf4"), lora.get("double_quant", False)
                whole = seen[name] = by_others(matrices[f"weight/{name}"], *form)
            rows, columns = own.shape
            assert torch.equal(own, whole[row : row + rows, column : column + columns].to(own.dtype)), name
    assert len(seen) == (6 if "num_experts" in shape else 7) * MODEL["layers"]
    expected = references.run(jobs_quantized.train, configuration({}, prefix, shape, **lora), STEPS)
    for rank in ranks.run(world(case), jobs_quantized.train, config, STEPS):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-9, abs=0)
        for name, value in rank["tensors"].items():
            assert (value - expected["tensors"][name]).abs().max() <= 1e-9, name


@pytest.mark.parametrize(
    ("case", "double"), [({"dp": 2, "zero": 3}, True), ({"tp": 2, "dp": 2, "zero": 1}, False), ({"pp": 2}, True)]
)
def test_memory_is_what_is_planned(case, double, ranks, prefix):
    config = configuration({**case, "microbatches": 2}, prefix, WHOLE, "bf16", double_quant=double)
    for measured, expected in ranks.run(world(case), jobs_training.model_states, config):
        assert measured == expected
    plain = configuration({**case, "microbatches": 2}, prefix, WHOLE, "bf16", base="none")
    before = max(states.weights for _, states in ranks.run(world(case), jobs_training.model_states, plain))
    assert (
        max(planned.weights for _, planned in ranks.run(world(case), jobs_training.model_states, config)) < before / 2
    )


@pytest.mark.parametrize(
    ("case", "lora"),
    [({"tp": 2}, {"base": "int8"}), ({"tp": 2}, {}), ({"dp": 2, "zero": 3}, {"double_quant": True})],
)
def test_a_rank_reads_its_part_in_the_memory_that_is_planned(case, lora, ranks, prefix):
    """Of columns it reads whole rows, and with double quantization all rows."""
    config = configuration(case, prefix, WHOLE | {"hidden_size": 256}, "bf16", **lora)
    for most, planned, _ in ranks.run(2, jobs_quantized.loading, config, 1 << 12):
        assert 0.75 * planned <= most <= planned


@pytest.mark.parametrize(("saved", "resumed"), [({"tp": 2, "pp": 2}, {"dp": 2, "zero": 3}), ({"dp": 2, "zero": 3}, {})])
def test_resumes_on_another_layout_and_with_the_same_base_alone(saved, resumed, ranks, prefix, tmp_path):
    def run(case: Case) -> dict[str, Any]:
        config = configuration({**case, "microbatches": 2}, prefix, ODD, double_quant=True)
        config["run"] = {"dir": str(tmp_path), "name": f"run {world(case)}"}
        return config

    expected = ranks.run(world(saved), jobs_training.train_and_save, run(saved), 2, 2)[0]
    stored = {name.removeprefix("weight/") for name in expected["tensors"] if name.startswith("weight/")}
    assert not any(name.endswith(("qkv.weight", "q.weight", "down.weight")) for name in stored)
    config = run(resumed)
    config["checkpoint"]["load"] = expected["directory"]
    for got in ranks.run(world(resumed), jobs_training.resume, config, 2):
        assert got["losses"] == pytest.approx(expected["losses"][2:], rel=1e-9, abs=0)
    config["run"]["seed"], config["checkpoint"]["allow"] = 5, ["data"]
    said = ranks.run(world(resumed), jobs_quantized.refusal, config)[0]
    assert "no base (nf4)" in said and "the initialization by run.seed = 5 has other weights now" in said
