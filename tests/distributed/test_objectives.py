"""Objectives over preferences train the same on every layout as on one process: losses, metrics, gradient norms,
weights and validation losses.

fp64, within 1e-9, on packed rows with unequal numbers of pairs. Each layout has an option that another one has not.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megalite.objectives.dpo import DPO
from megalite.objectives.kto import KTO
from tests.support import jobs_training
from tests.support.configs import schedule_options
from tests.support.jobs_objectives import train_and_validate
from tests.support.preferences import VOCAB, write_labelled, write_preferences

STEPS, S = 2, 28
MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": S,
}
COMPUTED = ("objective", "preference", "reference", "lora", "tied", "model")
METRICS = {*DPO.metrics, *KTO.metrics}
LORA = {"rank": 4, "alpha": 8.0}
NONE = {"rank": 0, "alpha": 16.0}
REWARD = {"output_head": "reward"}
EXPERTS = {"num_experts": 4, "router_aux_loss_coef": 0.1}
BIASED = {"num_experts": 4, "router_scores": "sigmoid", "router_balance": "bias", "router_bias_rate": 0.5}
OWN = """
from megalite.objectives.objective import PairObjective


class SquaredHinge(PairObjective):
    \"\"\"max(0, 1 - x)², x = β times the difference of the log-ratios.\"\"\"

    needs_reference = True
    nll_weight = 0.25

    def losses(self, chosen, rejected):
        x = self.options.beta * (chosen.log_ratio - rejected.log_ratio)
        return (1 - x).relu().square()
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "dpo, tp 2, split sequence, chunks": {
        "objective": "dpo", "tp": 2, "sequence_parallel": True, "micro": 2, "chunk": 14,
        "preference": {"loss": "robust", "label_smoothing": 0.1}, "lora": {"dropout": 0.1},
    },
    "dpo, pp 2, dp 2, zero 3": {"objective": "dpo", "pp": 2, "dp": 2, "zero": 3, "micro": 1},
    "dpo, pp 2, zb-h2, steps that do not wait": {"objective": "dpo", "pp": 2, "schedule": "zb-h2", "micro": 1},
    "ipo, cp 2, ring": {"objective": "ipo", "cp": 2, "context": "ring", "micro": 1},
    "own, tp 2, pp 2, interleaved": {"objective": "own", "tp": 2, "pp": 2, "schedule": "interleaved-2", "micro": 1},
    "simpo, pp 2, zb-h1, tied": {"objective": "simpo", "pp": 2, "schedule": "zb-h1", "micro": 2, "tied": True},
    "cpo, dp 2, cp 2, chunks": {"objective": "cpo", "dp": 2, "cp": 2, "context": "gather", "micro": 2, "chunk": 8},
    "orpo, dp 2, zero 3, recomputed": {"objective": "orpo", "dp": 2, "zero": 3, "recompute": "full", "micro": 1},
    "kto, pp 2, dp 2, zero 3": {"objective": "kto", "pp": 2, "dp": 2, "zero": 3, "micro": 1},
    "kto, tp 2, cp 2": {"objective": "kto", "tp": 2, "cp": 2, "context": "ring", "micro": 2},
    "dpo, experts, ep 2": {"objective": "dpo", "dp": 2, "ep": 2, "micro": 2, "model": EXPERTS},
    "dpo, all parameters, tp 2, split sequence, pp 2, zb-h2": {
        "objective": "dpo", "lora": NONE, "tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h2", "micro": 1,
    },
    "kto, all parameters, pp 2, dp 2, zero 3": {
        "objective": "kto", "lora": NONE, "pp": 2, "dp": 2, "zero": 3, "micro": 1,
    },
    "ipo, saved modules, dp 2, cp 2": {
        "objective": "ipo", "lora": {"modules_to_save": ["embedding", "norms"]}, "dp": 2, "cp": 2, "context": "ring",
        "micro": 2,
    },
    "kto, second model, tp 2, pp 2": {
        "objective": "kto", "lora": NONE, "reference": "hf", "tp": 2, "pp": 2, "schedule": "zb-h2", "micro": 1,
    },
    "dpo, second model, dp 2, cp 2, zero 3": {
        "objective": "dpo", "reference": "hf", "dp": 2, "cp": 2, "context": "gather", "zero": 3, "micro": 2,
    },
    "reward, tp 2, split sequence, pp 2, adapters": {
        "objective": "reward", "tp": 2, "sequence_parallel": True, "pp": 2, "micro": 2,
        "preference": {"center_rewards": 0.1}, "lora": LORA, "model": REWARD,
    },
    "reward, dp 2, cp 2, zero 3, recomputed": {
        "objective": "reward", "dp": 2, "cp": 2, "context": "ring", "zero": 3, "recompute": "full", "micro": 1,
        "model": REWARD,
    },
    "reward, tp 2, pp 2, zb-h2": {
        "objective": "reward", "tp": 2, "pp": 2, "schedule": "zb-h2", "micro": 1, "model": REWARD |
        {"tie_word_embeddings": True},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eleven rows of one to three pairs."""
    lengths = np.random.default_rng(1).integers(1, 6, (24, 3)) + 1
    directory = tmp_path_factory.mktemp("data")
    labels = [row[2] > 3 for row in lengths.tolist()][:14]
    write_labelled(directory / "x_labelled", [(2 * row[0], 2 * row[1]) for row in lengths.tolist()[:14]], labels)
    torch.manual_seed(0)
    sizes = {name: MODEL[name] for name in MODEL if name.startswith(("num", "init", "max"))}
    shape = {"hidden_size": 48, "intermediate_size": 40, "vocab_size": VOCAB, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes | shape)).save_pretrained(directory / "reference")
    return write_preferences(directory / "x", lengths.tolist())


def configuration(prefix: str, objective: str, micro: int = 4, **options: Any) -> dict[str, Any]:
    layout = {name: options[name] for name in ("tp", "pp", "dp", "cp", "ep", "zero", "context") if name in options}
    schedule, virtual_stages = schedule_options(options.get("schedule", "1f1b"))
    if objective == "own":
        file = Path(prefix).with_name("own.py")
        file.write_text(OWN)
        objective = f"{file}:SquaredHinge"
    reference = objective in ("dpo", "ipo", "kto") or ".py" in objective
    data = prefix + "_labelled" if objective == "kto" else prefix
    return {
        "run": {"dir": prefix + "_runs"},
        "model": MODEL | {"tie_word_embeddings": options.get("tied", False)} | options.get("model", {}),
        "lora": LORA | options.get("lora", {}) if reference else options.get("lora", {}),
        "parallel": {
            **{"dp": 1, "sequence_parallel": options.get("sequence_parallel", False), "bucket_mb": 0.02},
            **{"schedule": schedule, "virtual_stages": virtual_stages},
            **layout,
        },
        "data": {
            **{"train": data, "validation": data, "sequence_length": S, "shuffle": False},
            "packing": objective != "kto",
        },
        "train": {
            **{"steps": STEPS, "global_batch_size": 4, "micro_batch_size": micro, "precision": "fp64"},
            **{"objective": objective, "loss_chunk": options.get("chunk", 0)},
            "recompute": options.get("recompute", "none"),
        },
        "preference": options.get("preference", {})
        | ({"reference": f"hf:{Path(prefix).with_name('reference')}"} if "reference" in options else {}),
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "checkpoint": {"load": "none"},
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    layout = LAYOUTS[name]
    kept = {key: value for key, value in layout.items() if key in COMPUTED}
    expected = references.run(train_and_validate, configuration(prefix, **kept), STEPS)
    world = prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    got = ranks.run(world, train_and_validate, configuration(prefix, **layout), STEPS)
    for rank in got:
        for key in ("losses", "grad_norms", "validation"):
            assert rank[key] == pytest.approx(expected[key], rel=1e-9), key
        for own, reference in zip(rank["metrics"], expected["metrics"], strict=True):
            names = METRICS & reference.keys()
            assert len(names) >= 4 and {name: own[name] for name in names} == pytest.approx(
                {name: reference[name] for name in names}, rel=1e-9, abs=1e-12
            )
    for tensor, value in expected["tensors"].items():
        torch.testing.assert_close(got[0]["tensors"][tensor], value, rtol=0, atol=1e-9, msg=tensor)
    assert expected["losses"][0] != pytest.approx(expected["losses"][-1], rel=1e-4), "it trains"


def test_a_run_that_resumes_has_the_reference_that_it_started_with(ranks, prefix):
    """All parameters are trained, routers learn biases, the layout changes: what resumes reads its start again."""
    run = {"dir": prefix + "_resumed"}
    one = configuration(prefix, "dpo", lora=NONE, model=BIASED, dp=2, zero=3, micro=1) | {"run": run}
    expected = ranks.run(2, jobs_training.train_and_save, one, 2, 1)[0]
    split = {"tp": 2, "sequence_parallel": True, "pp": 2, "micro": 2}
    other = configuration(prefix, "dpo", lora=NONE, model=BIASED, **split) | {"run": run | {"name": "other"}}
    other["checkpoint"] = {"load": expected["directory"]}
    for got in ranks.run(4, jobs_training.resume, other, 1):
        assert got["losses"] == pytest.approx(expected["losses"][2:], rel=1e-9)
        assert got["grad_norms"] == pytest.approx(expected["grad_norms"][2:], rel=1e-9)
