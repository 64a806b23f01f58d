"""What vLLM and SGLang read in an exported directory: fields of config.json by family, the description of quantized
matrices, companions, and adapters. `serving_fields.yaml` lists them as their code reads them; the engines do not run
here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.commands import convert
from megalite.config.sections.model import ModelConfig
from megalite.families.model_config import families, from_hf_config
from megalite.gguf.architectures import ARCHITECTURES
from megalite.huggingface.config_json import to_hf_config
from megalite.huggingface.convert import import_model
from megalite.huggingface.engine_fields import engine_fields
from tests.data.chats import CHATML, write_tokenizer
from tests.huggingface.hf_models import CASES, SIZES, UNTIED, Case, write
from tests.huggingface.served import READ
from tests.structure.newcomer import ROOT

FAMILIES = READ["families"]
DENSE_FIRST = ["dense", "sparse", "sparse"]
BY_TYPES = ("glm4_moe_lite", "hy_v3", "exaone_moe")


def configs(family: str) -> list[dict[str, Any]]:
    """config.json of exports of a family's cases."""
    import transformers

    written = []
    for case in CASES.values():
        fields = copy.deepcopy(case.fields) | ({"mlp_layer_types": DENSE_FIRST} if family in BY_TYPES else {})
        theirs = getattr(transformers, f"{case.family}Config")
        if theirs.model_type == family:
            model = ModelConfig(**from_hf_config(json.loads(theirs(**fields).to_json_string(use_diff=False))))
            config = to_hf_config(model, family)
            written.append(config | engine_fields(config))
    return written


def test_every_family_is_in_the_list() -> None:
    assert set(FAMILIES) == set(families().rows)


@pytest.mark.parametrize("family", [family for family, row in FAMILIES.items() if "fields" in row])
def test_a_config_has_the_fields_that_engines_read(family: str) -> None:
    needed = set(FAMILIES[family]["fields"].split())
    for config in configs(family):
        assert needed - config.keys() == set()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    sizes = SIZES | UNTIED | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "vocab_size": 448}
    sizes |= {"num_hidden_layers": 1}
    write_tokenizer(write(Case("Llama", sizes, torch.bfloat16), place / "hf"), CHATML)
    (place / "hf" / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6}')
    import_model(place / "hf", place / "checkpoint")
    return place / "checkpoint"


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "nf4"])
def test_a_directory_has_what_engines_read(dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    assert convert.main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", dtype]) == 0
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHATML
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    needed = {*READ["every"].split(), *FAMILIES["llama"]["fields"].split(), "bos_token_id", "eos_token_id"}
    assert needed - config.keys() == set()
    assert (config["architectures"], config["torch_dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == (2, 0.6)
    if dtype in READ["quantized"]:
        assert set(READ["quantized"][dtype].split()) - config["quantization_config"].keys() == set()
    else:
        assert "quantization_config" not in config


def test_the_page_lists_every_family() -> None:
    """Formats and engines of each, from the tables."""
    named = {"own": "yes", "backend": "transformers backend", "none": "no"}
    rows = [
        f"| {family} | {ARCHITECTURES[family].name if family in ARCHITECTURES else 'no'} | "
        + " | ".join(named[FAMILIES[family]["engines"][engine]] for engine in ("vllm", "sglang"))
        + " |"
        for family in families().rows
    ]
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in page
