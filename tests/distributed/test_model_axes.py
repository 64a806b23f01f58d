"""Every axis of the model on every kind of parallelism equals one process, in fp64: losses, gradient norms and weights
within 1e-9.

A row is a family's set of axis values; a column a layout. Nothing here is dropped by an error of rounding size: a
missing sum over tp, a doubled gradient or a window that forgets its layer's global index differs by orders of magnitude
more.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.support import jobs
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.layouts import Case

STEPS, TOLERANCE = 2, 1e-9
BASE: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 4, "masked": True, "dropout": 0.0}

GPT2 = {
    **{
        "position": "learned",
        "norm": "layer",
        "gated_mlp": False,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
    },
    **{"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
# Listed layers differ from one half to the other, so that a stage that counts its own layers is found out.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {"model": GPT2},
    "full-width qk-norm, post norm": {"model": {"qk_norm": "full", "norm_placement": "post", "num_key_value_heads": 1}},
    "per-head qk-norm, head_dim": {"model": {"qk_norm": "head", "num_key_value_heads": 1, "head_dim": 12}},
    "both norms, offset, soft-caps, windows": {
        "model": {
            **{
                "norm_placement": "both",
                "norm_offset": 1.0,
                "attention_softcap": 5.0,
                "logit_softcap": 3.0,
                "embedding_scale": 5.7,
            },
            **{
                "sliding_window": 5,
                "sliding_window_layers": [0, 3],
                "attention_scale": 0.3,
                "hidden_act": "gelu_pytorch_tanh",
            },
            "tie_word_embeddings": True,
        }
    },
    "layers without rope, llama3 rope, biases": {
        "model": {
            "no_rope_layers": [1, 2],
            "rope_scaling": LLAMA3_ROPE,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "relu",
        }
    },
    "no positions, layer norm, dropout": {
        "model": {"position": "none", "norm": "layer", "attention_dropout": 0.2, "residual_dropout": 0.2},
    },
    "parallel, one norm, multipliers": {
        "model": {
            **{
                "parallel_block": "shared_norm",
                "norm": "layer",
                "norm_bias": False,
                "residual_multiplier": 0.3,
                "logit_scale": 0.4,
            },
            **{
                "partial_rotary_factor": 0.5,
                "gated_mlp": False,
                "hidden_act": "relu2",
                "num_key_value_heads": 1,
                "qk_norm": "each_head",
            },
        }
    },
    "parallel, two norms with offset, two thetas": {
        "model": {
            **{"parallel_block": "two_norms", "norm": "layer", "norm_offset": 1.0, "tie_word_embeddings": True},
            **{
                "rope_local_theta": 50.0,
                "sliding_window": 5,
                "sliding_window_layers": [0, 3],
                "rope_scaling": LLAMA3_ROPE,
            },
        }
    },
    "label smoothing, z-loss": {"train": {"label_smoothing": 0.1, "z_loss": 1e-3}},
}
LAYOUTS: dict[str, Case] = {
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2, "microbatches": 4},
    "tp2-sp-pp2-dp2": {"tp": 2, "sequence_parallel": True, "pp": 2, "dp": 2, "zero": 1, "microbatches": 2},
}
CASES = [("gpt2", "tp2-sp"), ("gpt2", "pp2"), *product(AXES, ("tp4", "tp2-sp-pp2-dp2"))]
"""Every row with a column that shares key-value heads, and with one of all axes together."""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), BASE["vocab_size"])


@pytest.fixture(scope="module")
def run(ranks, prefix):
    """One process is computed once for each row."""
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def of(axes: str, layout: str) -> list[dict[str, Any]]:
        if (axes, layout) not in known:
            case = {**BASE, **LAYOUTS.get(layout, {})}
            config = config_of(case, prefix, "fp64")
            config = {section: {**values, **AXES[axes].get(section, {})} for section, values in config.items()}
            known[axes, layout] = ranks.run(case["tp"] * case["pp"] * case["dp"], jobs.train, config, STEPS)
        return known[axes, layout]

    return of


@pytest.mark.parametrize(("axes", "layout"), CASES)
def test_equals_one_process(axes, layout, run):
    expected, got = run(axes, "single")[0], run(axes, layout)
    for result in got:
        assert result["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE, abs=0)
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=TOLERANCE, abs=0)
    tensors = got[0]["tensors"]
    assert tensors.keys() == expected["tensors"].keys()
    worst = {name: (value - expected["tensors"][name]).abs().max().item() for name, value in tensors.items()}
    assert max(worst.values()) <= TOLERANCE, sorted(worst.items(), key=lambda item: -item[1])[:5]


def test_every_row_is_another_model(run):
    first_losses = [run(axes, "single")[0]["losses"][-1] for axes in AXES]
    assert len(set(first_losses)) == len(AXES)
