"""One way to name a model, for every command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.checkpoint import CheckpointError
from megalite.checkpoint.manifest import encode
from megalite.commands.models import config_of, hf_directory, weights_of
from megalite.commands.parser import as_name, as_path, as_tokenizer
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict, to_yaml
from megalite.config.schema import Config
from tests.families.hub_cache import LLAMA, SHAPE, TOKENIZER, hub_cache, store


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Every kind of name of one model."""
    with hub_cache(tmp_path) as cache:
        hub_files = store(cache, "org/name", {**SHAPE, "model.safetensors": ""})
        Path("hf").mkdir()
        Path("hf/config.json").write_text(json.dumps(LLAMA))
        Path("other.json").write_text(json.dumps(LLAMA))
        config = config_of("other.json", 1)
        config.run.name = "trained"
        Path("run.yaml").write_text(to_yaml(config))
        for place in ("runs/trained", "runs/fresh"):
            Path(place).mkdir(parents=True)
            Path(place, "config.yaml").write_text(to_yaml(config))
        step = Path("runs/trained/checkpoints/step_00000001")
        step.mkdir(parents=True)
        (step.parent / "latest").write_text(step.name)
        step.joinpath("manifest.json").write_text(encode({"step": 1, "config": to_dict(config)}, {}))
        yield {
            **{
                "directory": "hf",
                "hf:": "hf:hf",
                "config.json": "hf/config.json",
                "file": "other.json",
                "configuration": "run.yaml",
            },
            **{
                "hub": "org/name",
                "hf:hub": "hf:org/name",
                "run": "runs/trained",
                "fresh run": "runs/fresh",
                "checkpoint": str(step),
            },
            **{"snapshot": str(hub_files)},
        }


def test_every_name_gives_the_same_shape(names: dict[str, str]):
    by_kind = {kind: config_of(name, 8).model for kind, name in names.items()}
    assert {
        kind: (model.hidden_size, model.num_hidden_layers, model.vocab_size) for kind, model in by_kind.items()
    } == dict.fromkeys(names, (48, 3, 300))
    assert (
        config_of("llama-3-8b", 8).model.preset == "llama-3-8b" and config_of("quickstart", 8).run.name == "quickstart"
    )


def test_precision_is_the_configurations_own_where_it_says_one(names: dict[str, str]):
    Path("silent.yaml").write_text("model: {preset: gpt2-124m}\n")
    assert [config_of(name, 1).train.precision for name in ("silent.yaml", "tiny", "hf")] == ["bf16"] * 3
    Path("says.yaml").write_text("model: {preset: gpt2-124m}\ntrain: {precision: fp32}\n")
    assert config_of("says.yaml", 1).train.precision == "fp32"


def test_names_of_weights(names: dict[str, str]):
    by_kind = {kind: weights_of(name) for kind, name in names.items() if kind not in ("file", "fresh run")}
    step, hub = names["checkpoint"], f"hf:{names['snapshot']}"
    assert by_kind == {
        **{"directory": "hf:hf", "hf:": "hf:hf", "config.json": "hf:hf", "configuration": "runs/trained"},
        **{"hub": hub, "hf:hub": hub, "run": "runs/trained", "checkpoint": step, "snapshot": hub},
    }
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint"):
        weights_of("nowhere")


def test_names_without_weights_are_refused(names: dict[str, str]):
    for name, message in (
        ("tiny", "tiny is a preset, which has no weights"),
        ("runs/fresh", "no checkpoint found"),
    ):
        if name == "runs/fresh":
            Path("runs/trained/checkpoints/latest").unlink()
        with pytest.raises(ConfigError, match=message):
            weights_of(name)
    with pytest.raises(ConfigError, match="--model llama-3-9b is not a known model.*Nearest: llama-3-8b"):
        config_of("llama-3-9b", 1)


def test_hugging_face_directories(names: dict[str, str]):
    assert [str(hf_directory(names[kind], "weights", "HF_DIR")) for kind in ("directory", "hf:", "hub")] == [
        "hf",
        "hf",
        names["snapshot"],
    ]
    with pytest.raises(ConfigError, match="HF_DIR runs/trained is not a Hugging Face model"):
        hf_directory("runs/trained", "weights", "HF_DIR")
    with pytest.raises(ConfigError, match="HF_DIR hf:runs: runs/config.json could not be read"):
        hf_directory("hf:runs", "weights", "HF_DIR")


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        as_path("~/x.yaml") == tmp_path / "x.yaml"
        and as_name("hf:~/llama") == f"hf:{tmp_path}/llama"
        and as_name("tiny") == "tiny"
    )
    (tmp_path / "run.yaml").write_text(to_yaml(from_dict({"model": {"hidden_size": 32}})))
    assert config_of("~/run.yaml", 1).model.hidden_size == 32 != Config().model.hidden_size


def test_a_tokenizer_of_the_hub_is_its_directory(tmp_path: Path):
    with hub_cache(tmp_path) as cache:
        directory = store(cache, "org/name", TOKENIZER)
        assert (
            as_tokenizer("org/name") == as_tokenizer("hf:org/name") == str(directory) and as_tokenizer("byte") == "byte"
        )
        with pytest.raises(argparse.ArgumentTypeError, match="hf download org/other"):
            as_tokenizer("org/other")
