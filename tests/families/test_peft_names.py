"""PEFT's names of modules in the options of adapters, of one family and of all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.config.values import parse_values
from megalite.families.module_names import FAMILY_NAMES
from megalite.families.peft_names import with_own_names


def own(family: str | None, place: Path, **options: Any) -> dict[str, Any]:
    given = {f"lora.{name}": value for name, value in options.items()}
    if family is not None:
        (place / "config.json").write_text(json.dumps({"model_type": family}))
        given["model.init_from"] = f"hf:{place}"
    return {name.removeprefix("lora."): value for name, value in with_own_names(given).items()}


@pytest.mark.parametrize(
    ("family", "names", "roles"),
    [
        ("llama", ["q_proj", "v_proj"], ["q", "v"]),
        ("llama", ["self_attn.o_proj", "down"], ["o", "down"]),
        ("llama", ["all-linear"], None),
        ("phi3", ["qkv_proj", "gate_up_proj"], ["q", "k", "v", "gate", "up"]),
        ("gpt_neox", ["query_key_value", "dense"], ["q", "k", "v", "o"]),
        ("gpt2", ["c_proj"], ["o", "down"]),
        ("gpt2", ["attn.c_proj", "c_attn"], ["o", "q", "k", "v"]),
        ("starcoder2", ["c_proj"], ["down"]),
        ("qwen3_next", ["q_proj", "in_proj_ba"], ["q", "attention_gate", "delta_b", "delta_a"]),
        ("kimi_linear", ["q_proj", "f_a_proj", "o_proj"], ["q", "delta_q", "delta_f_a", "o", "delta_o"]),
        ("nanochat", ["fc1", "o_proj"], ["up", "o"]),
        ("hunyuan_v1_moe", ["q_proj", "shared_mlp.up_proj"], ["q", "up"]),
        ("lfm2", ["in_proj", "out_proj", "w1"], ["conv_B", "conv_C", "conv_x", "o", "conv_o", "gate"]),
        (None, ["q_proj", "query_key_value"], ["q", "k", "v"]),
        ("qwen3_moe", ["q_proj", "mlp.experts.gate_up_proj", "experts.down_proj"], ["q", "experts.in", "experts.down"]),
        ("bamba", ["in_proj", "out_proj"], ["mamba_z", "mamba_x", "mamba_B", "mamba_C", "mamba_dt", "mamba_o"]),
        ("granitemoehybrid", ["shared_mlp.input_linear", "experts.gate_up_proj"], ["gate", "up", "experts.in"]),
        ("nemotron_h", ["up_proj", "experts.up_proj"], ["up", "experts.in"]),
        ("granitemoeshared", ["input_linear", "experts.gate_up_proj"], ["gate", "up", "experts.in"]),
        ("hy_v3", ["shared_mlp.down_proj", "gate_proj"], ["down", "gate"]),
        ("afmoe", ["self_attn.gate_proj", "shared_experts.up_proj"], ["attention_gate", "up"]),
        ("mixtral", ["all-linear", "experts.in"], ["q", "k", "v", "o", "gate", "up", "down", "experts.in"]),
    ],
)
def test_targets(family, names, roles, tmp_path):
    assert own(family, tmp_path, targets=names) == {"targets": roles}


@pytest.mark.parametrize("family", sorted({name.partition(",")[0] for name in FAMILY_NAMES}))
def test_all_names_of_a_family_are_all_linear(family, tmp_path):
    """Every matrix of a layer but those of routers, indexers, experts and their latents: PEFT's all-linear, which finds
    those of indexers, too."""
    layer = FAMILY_NAMES[family].layer
    linears = [
        name
        for name, ours in layer.items()
        if not any(
            word in ours
            for word in (
                "norm",
                "router",
                "experts",
                "shared_gate",
                "sinks",
                ".conv",
                ".a_log",
                ".dt_bias",
                "latent_",
                ".alpha_",
                "indexer",
            )
        )
        and ours != "mixer.d"
    ]
    result = own(family, tmp_path, targets=linears)["targets"]
    attention = {"q", "q_a", "q_b", "kv_a", "kv_b"} if "attention.kv_a" in layer.values() else {"q", "k", "v"}
    feed_forward = {"up", "down"} if any(ours.endswith(("mlp.up", "shared.up")) for ours in layer.values()) else set()
    if "attention.gate" in " ".join(layer.values()):
        attention |= {"attention_gate"}
    prefix = FAMILY_NAMES[family].mixer
    parts = re.findall(r"mixer\.(\w+)", " ".join(layer[name] for name in linears))
    attention |= {f"{prefix}{part}".replace("out", "o") for part in parts}
    assert {*result} | {"gate"} == {*attention, "o", "gate", *feed_forward} and len(result) == len(set(result))


def test_ranks_alphas_and_modules(tmp_path):
    result = own(
        "phi3",
        tmp_path,
        ranks={"qkv_proj": 4, "down": 2},
        alphas={"o_proj": 3.0},
        modules_to_save=["embed_tokens", "lm_head", "norms"],
    )
    assert result == {
        "ranks": {"q": 4, "k": 4, "v": 4, "down": 2},
        "alphas": {"o": 3.0},
        "modules_to_save": ["embedding", "head", "norms"],
    }
    assert own("gpt2", tmp_path, modules_to_save=["wte"]) == {"modules_to_save": ["embedding"]}


def test_unknown_names_are_answered_with_the_family_s(tmp_path):
    with pytest.raises(ConfigError) as caught:
        own("phi3", tmp_path, targets=["o_proj", "q_proj"])
    assert str(caught.value) == (
        'lora.targets = ["o_proj", "q_proj"] contains q_proj, which is not a projection of a phi3 model. Legal values: '
        "all-linear, q, k, v, o, "
        "gate, up, down, qkv_proj, gate_up_proj, o_proj, down_proj. Nearest: qkv_proj."
    )
    with pytest.raises(
        ConfigError, match=r"contains lm_haed, which is not a module of any family .* Nearest: lm_head[.]"
    ):
        own(None, tmp_path, modules_to_save=["lm_haed"])
    with pytest.raises(ConfigError, match="contains v twice"):
        own("phi3", tmp_path, ranks={"qkv_proj": 4, "v": 2})


def test_options_keep_their_types():
    given = parse_values({"lora.ranks": "{q_proj: 4}", "lora.alphas": "{q_proj: 4}"}, "on the command line", words=True)
    assert with_own_names(given) == {"lora.ranks": {"q": 4}, "lora.alphas": {"q": 4.0}}
