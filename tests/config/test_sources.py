"""Which source of an option counts: what is said later wins, and a preset or a Hugging Face model replaces the whole
shape before it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.commands.models import config_of
from megalite.config.load import load_config
from megalite.config.sections.model import ModelConfig
from megalite.families.presets import presets

TINY = "model: {preset: tiny, num_hidden_layers: 6, max_position_embeddings: 640}"
SMALL = "model: {hidden_size: 64, num_attention_heads: 2, tie_word_embeddings: true, vocab_size: 300}"
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
QWEN |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 999, "tie_word_embeddings": False}
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
SHAPE |= {
    "max_position_embeddings": 512,
    "vocab_size": 999,
    "from_hf": "hf",
    "attention_bias": True,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokens.bin", "tokens.idx"):
        (tmp_path / name).touch()
    (tmp_path / "tokens.json").write_text('{"vocab_size": 257, "eos": 256}')
    for name in ("hf", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN))


def model(files: tuple[str, ...], *argv: str) -> ModelConfig:
    words = ["--data.train", "tokens", "--data.sequence_length", "64", *argv]
    for number, text in enumerate(files):
        Path(f"{number}.yaml").write_text(text)
        words += ["--config", f"{number}.yaml"]
    return load_config(words, world_size=1).model


def preset(name: str, **changed: Any) -> dict[str, Any]:
    return {**presets()[name], "preset": name, **changed}


@pytest.mark.parametrize(
    "files, argv, expected",
    [
        ((SMALL,), "--model.preset tiny", preset("tiny", vocab_size=257)),
        ((SMALL,), "--model.preset llama-3.2-1b", preset("llama-3.2-1b")),
        (
            (SMALL,),
            "--model.preset tiny --model.num_hidden_layers 2",
            preset("tiny", num_hidden_layers=2, vocab_size=257),
        ),
        ((TINY,), "", preset("tiny", num_hidden_layers=6, max_position_embeddings=640, vocab_size=257)),
        (
            (TINY,),
            "--model.num_hidden_layers 5",
            preset("tiny", num_hidden_layers=5, max_position_embeddings=640, vocab_size=257),
        ),
        ((TINY,), "--model.preset gpt2-124m", preset("gpt2-124m")),
        ((SMALL,), "--model.from_hf hf", SHAPE),
        ((TINY,), "--model.from_hf hf", SHAPE),
        ((TINY, "model: {from_hf: hf, num_hidden_layers: 4}"), "", {**SHAPE, "num_hidden_layers": 4}),
        (
            ("model: {from_hf: hf}", TINY),
            "",
            preset("tiny", num_hidden_layers=6, max_position_embeddings=640, vocab_size=257),
        ),
        ((SMALL, "model: {num_hidden_layers: 3}"), "", {**yaml.safe_load(SMALL)["model"], "num_hidden_layers": 3}),
        ((TINY,), "--model.preset null", {"num_hidden_layers": 6, "max_position_embeddings": 640, "vocab_size": 257}),
        ((SMALL, "model: {preset: null, from_hf: null}"), "", yaml.safe_load(SMALL)["model"]),
        (("model: {init_from: none}", SMALL), "--model.preset tiny", preset("tiny", vocab_size=257, init_from="none")),
        (
            ("model: {init_from: hf:hf, hidden_size: 8}",),
            "--model.from_hf ./hf",
            {**SHAPE, "from_hf": "./hf", "init_from": "hf:hf"},
        ),
        (("model: {init_from: hf:other}",), "--model.from_hf hf", {**SHAPE, "init_from": "hf:other"}),
        (
            ("model: {from_hf: other, init_from: hf:other}",),
            "--model.from_hf hf --model.init_from hf:hf",
            {**SHAPE, "init_from": "hf:hf"},
        ),
    ],
)
def test_the_shape_is_that_of_the_last_source_that_names_one(files, argv, expected):
    assert asdict(model(files, *argv.split())) == asdict(ModelConfig(**expected))


@pytest.mark.parametrize(
    "argv, way_out",
    [
        (
            "--model.from_hf hf",
            "model.from_hf = hf on the command line replaces it. Set model.init_from to hf:hf, or to none for random",
        ),
        (
            "--model.preset tiny",
            "model.preset = tiny on the command line replaces it. Set model.init_from to weights of that shape, or to "
            "none",
        ),
    ],
)
def test_weights_of_the_model_that_is_replaced_are_not_kept_silently(capsys, argv, way_out):
    with pytest.raises(SystemExit):
        model(("model: {from_hf: other, init_from: hf:other}",), *argv.split())
    assert (
        f"model.init_from = hf:other in 0.yaml belongs to the model that was set there, but {way_out}"
        in capsys.readouterr().err
    )


def test_what_names_the_same_model_again_keeps_its_weights_and_new_rows():
    weights = "model: {preset: tiny, init_from: runs/a, resize_embeddings: mean}"
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/manifest.json").touch()
    again = model((weights,), "--model.preset", "tiny")
    assert (again.init_from, again.resize_embeddings) == ("runs/a", "mean")
    result = model(
        (f"model: {{from_hf: hf, init_from: 'hf:{Path('hf').absolute()}', resize_embeddings: mean}}",),
        "--model.from_hf",
        "./hf",
    )
    assert result.init_from == f"hf:{Path('hf').absolute()}" and result.resize_embeddings == "mean"


def test_one_source_names_one_shape(capsys):
    with pytest.raises(SystemExit):
        model(("model: {preset: tiny, from_hf: hf}",))
    assert "model.from_hf = hf and model.preset = tiny both set the shape" in capsys.readouterr().err


def printed(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        load_config([*words, "--print_config"], world_size=2)
    assert end.value.code == 0
    return capsys.readouterr().out


ORIGINS = {
    "model.preset": "tiny # 0.yaml",
    "model.hidden_size": "128 # preset tiny",
    "model.num_hidden_layers": "6 # 0.yaml",
    "model.norm": "rms # default",
    "model.vocab_size": "257 # data.train",
    "parallel.dp": "1 # the number of ranks",
    "parallel.tp": "2 # command line",
    "train.steps": "123 # 0.yaml, train.tokens = 1000000",
    "train.tokens": "null # 0.yaml, in steps",
    "train.precision": "fp32 # default",
    "optimizer.lr": "0.02 # command line",
    "optimizer.betas": "# 0.yaml",
    "optimizer.warmup_steps": "7 # 0.yaml, in steps",
    "muon.lr": "0.02 # default",
}


def test_print_config_says_where_each_value_is_from_and_is_a_configuration(capsys):
    length = (
        "data: {sequence_length: 256}\ntrain: {tokens: 1M}\noptimizer: {betas: [0.8, 0.9], warmup_steps: 5%, lr: 0.01}"
    )
    Path("0.yaml").write_text(f"{TINY}\n{length}\nrun: {{name: '# a'}}")
    words = ["--config", "0.yaml", "--data.train", "tokens", "--optimizer.lr", "0.02", "--tp", "2"]
    text, section, said = printed(capsys, *words), "", dict[str, str]()
    for line in text.splitlines():
        key, _, rest = line.strip().partition(":")
        section = section if line.startswith(" ") else key
        said[f"{section}.{key}"] = " ".join(rest.split())
    assert {option: said[option] for option in ORIGINS} == ORIGINS
    config = load_config(words, world_size=2)
    Path("resolved.yaml").write_text(text)
    assert load_config(["--config", "resolved.yaml"], world_size=2) == config and config.run.name == "# a"


def test_a_resolved_configuration_is_replaced_by_a_later_preset(capsys):
    Path("0.yaml").write_text(TINY)
    Path("resolved.yaml").write_text(printed(capsys, "--config", "0.yaml", "--data.train", "tokens"))
    words = ["--config", "resolved.yaml", "--model.preset", "gpt2-124m"]
    assert asdict(load_config(words, world_size=2).model) == asdict(ModelConfig(**preset("gpt2-124m")))


def test_a_configuration_that_a_command_takes_by_name_is_read_alike():
    Path("0.yaml").write_text(TINY)
    assert asdict(config_of("0.yaml", 1).model) == asdict(
        ModelConfig(**preset("tiny", num_hidden_layers=6, max_position_embeddings=640))
    )
