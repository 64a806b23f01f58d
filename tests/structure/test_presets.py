"""Every file in configs/ is a run that would start on its number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from megalite.assembly import parts as build
from megalite.config.load import load_config
from megalite.data.preparation.writer import IndexedWriter
from megalite.model.parameters import model_specs
from megalite.parallel.spec import parameter_count
from megalite.training.dry_run import bubble
from tests.structure.sources import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RANKS = {"quickstart": 8, "llama-3-8b": 64, "llama-3-8b-128k": 64, "llama-3-70b": 512}
RANKS |= {"mixtral-8x7b": 64, "olmoe-1b-7b": 32, "qwen3-30b-a3b": 64}
LARGE = [name for name in RANKS if name not in ("quickstart", "llama-3-8b-128k")]
LAYOUT = {"quickstart": ["--tp", "2", "--pp", "2", "--dp", "2"]}
PARAMETERS = {  # by hand, norms and biases included; Llama 3 as published
    "quickstart": 4096 * 128 + 4 * (128 * (128 * 2 + 64 * 2) + 3 * 128 * 352 + 2 * 128) + 128,
    "shakespeare-char": (257 + 64) * 128 + 4 * (12 * 128**2 + 4 * 128) + 2 * 128,
    "llama-25m": 2 * 8192 * 512 + 6 * (512 * (512 * 2 + 256 * 2) + 3 * 512 * 1376 + 2 * 512) + 512,
    # the default shape, as of the next
    "finetune-lora": 2 * 257 * 256 + 4 * (4 * 256**2 + 3 * 256 * 688 + 2 * 256) + 256,
    # the default shape: --model.from_hf gives another
    "finetune-chat": 2 * 257 * 256 + 4 * (4 * 256**2 + 3 * 256 * 688 + 2 * 256) + 256,
    "llama-3-8b": 8_030_261_248,
    "llama-3-8b-128k": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,  # this and the next two as transformers counts them
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.fixture
def tokens(tmp_path: Path) -> dict[bool, str]:
    """Prefixes of token files: False of text, True of conversations."""
    prefixes = {}
    for chat in (False, True):
        with IndexedWriter(tmp_path / f"tokens {chat}", 257) as writer:
            writer.add(np.arange(300_000) % 257, [300_000])
            writer.finish({"vocab_size": 257, "eos": 256, "tokenizer": "byte"} | ({"chat": {}} if chat else {}))
        prefixes[chat] = str(tmp_path / f"tokens {chat}")
    return prefixes


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_preset_would_start_and_has_the_size_that_it_says(path: Path, tokens: dict[bool, str]):
    name = path.stem
    data = tokens[name.startswith("finetune-")]
    vocabulary = ["--model.vocab_size", "4096"] if name == "quickstart" else []
    config = load_config(
        ["--config", str(path), "--data.train", data, *vocabulary, *LAYOUT.get(name, [])], world_size=RANKS.get(name, 1)
    )
    assert parameter_count(model_specs(config.model)) == PARAMETERS[name]
    assert sum(build.partition(config)) == config.model.num_hidden_layers
    microbatches = build.layout(config).microbatches
    assert build.schedule(config, microbatches).placement  # the validator has passed it
    assert config.run.name == name


@pytest.mark.parametrize("name", LARGE)
def test_the_large_presets_name_their_layout_and_the_bubble_of_the_dry_run(name: str, tokens: dict[bool, str]):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    sizes = yaml.safe_load(text)["parallel"]
    assert sizes.get("tp", 1) * sizes.get("pp", 1) * sizes["dp"] == RANKS[name]
    config = load_config(["--config", name, "--data.train", tokens[False]], world_size=RANKS[name])
    schedule = build.schedule(config, build.layout(config).microbatches)
    (documented,) = re.findall(r"The bubble is ([\d.]+) %", text)
    assert documented == f"{100 * bubble(config, schedule):.1f}"
