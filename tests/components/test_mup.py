"""Growth, initial deviations and learning rates of model.mup beside the mup package, for transformers' Llama.

mup reads which dimensions differ between models of three widths and calls them infinite. Exceptions, where model.mup
goes beyond it, are listed in EXCEPTIONS.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from megalite.config.load import from_dict
from megalite.model.parameters import model_specs
from megalite.optimizer.registry import lr_factor
from tests.components.environments import python_of

WIDTH, BASE, KV = 256, 64, 2
SIZES = {"vocab_size": 96, "num_hidden_layers": 1, "max_position_embeddings": 32}
EXCEPTIONS = {"fixed key-value heads": {"k", "v"}, "grown key-value heads": set[str]()}
"""mup counts a matrix of which only the columns grow as an output, with a constant deviation and rate."""

PROGRAM = """
import json, sys
sys.modules["torchvision"] = None  # mup asks for it, and its wheel does not load beside a CPU build of torch
import torch
from mup import MuAdamW, MuReadout, set_base_shapes
from mup.init import normal_
from transformers import LlamaConfig, LlamaForCausalLM

spec = json.loads(sys.argv[1])

def model(width):
    heads = width // 16
    kv = spec["kv"] or heads
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": heads}
    llama = LlamaForCausalLM(LlamaConfig(num_key_value_heads=kv, **sizes, **spec["sizes"]))
    llama.lm_head = MuReadout(width, spec["sizes"]["vocab_size"], bias=False)
    return llama

llama = model(spec["width"])
set_base_shapes(llama, model(spec["base"]), delta=model(2 * spec["base"]), do_assert=False)
names = {id(value): name for name, value in llama.named_parameters()}
rates = {
    names[id(value)]: (group["lr"], group["weight_decay"])
    for group in MuAdamW(llama.parameters(), lr=1.0, weight_decay=1.0).param_groups
    for value in group["params"]
}
found = {}
for name, value in llama.named_parameters():
    torch.manual_seed(0)
    normal_(value, 0.0, 0.02)  # as mup rescales the deviation
    infinite = [dimension.isinf() for dimension in value.infshape]
    found[name] = {"std": value.std().item(), "lr": rates[name][0], "wd": rates[name][1], "infinite": infinite}
found["lm_head.weight"]["multiplier"] = 1 / llama.lm_head.width_mult()
print(json.dumps(found))
"""
MODULES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj"}
MODULES |= {"down": "down_proj"}


@pytest.mark.parametrize("case", EXCEPTIONS)
def test_groups_and_multipliers_are_those_of_the_mup_package(case):
    kv = KV if case.startswith("fixed") else None
    wanted = {"width": WIDTH, "base": BASE, "kv": kv, "sizes": SIZES}
    program = [python_of("mup"), "-c", PROGRAM, json.dumps(wanted)]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(program, capture_output=True, text=True, check=False, env=outside)
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout)
    heads = {"num_attention_heads": WIDTH // 16, "num_key_value_heads": kv}
    mup = {"base_width": BASE} | ({"num_key_value_heads": kv} if kv else {})
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    config = from_dict({"model": {**SIZES, **sizes, **heads, "mup": mup, "initializer_range": 0.02}})
    ours = {segment.name: segment for spec in model_specs(config.model) for segment in spec.segments}
    assert theirs["lm_head.weight"]["multiplier"] == config.model.logit_factor == BASE / WIDTH
    compared = 0
    for role, module in MODULES.items():
        (own,) = (segment for segment in ours.values() if segment.role == role)
        (name,) = (name for name in theirs if f".{module}." in name)
        assert [growth > 1 for growth in own.growth] == theirs[name]["infinite"]
        if role in EXCEPTIONS[case]:
            assert theirs[name]["lr"] == 1.0 and lr_factor(own) == BASE / WIDTH
            continue
        assert lr_factor(own) == theirs[name]["lr"] == 1 / theirs[name]["wd"]
        deviation = own.init_std * (2**0.5 if role in ("o", "down") else 1)  # of two blocks that add to the stream
        assert deviation == pytest.approx(theirs[name]["std"], rel=0.02)
        compared += 1
    assert compared == len(MODULES) - len(EXCEPTIONS[case])
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert theirs[name]["lr"] == 1.0
    tables = [ours[name] for name in ("embedding.weight", "head.weight")]
    assert all(lr_factor(each) == 1.0 and each.init_std == 0.02 for each in tables)
    assert theirs["model.embed_tokens.weight"]["std"] == pytest.approx(0.02, rel=0.02)
