"""A run's copy of its tokenizer: the model is used with it once the data and its tokenizer were replaced or are
gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.assembly import parts as build
from megalite.commands import convert
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.tokenizer.identity import fingerprint
from megalite.data.tokenizer.run_copy import keep
from megalite.data.tokenizer.tokenizers import load
from megalite.generation.sources import open_source, tokenizer_of
from megalite.launch.exit_status import ExitStatus
from megalite.training.job import begin
from megalite.training.tokenizer_checks import check_tokenizers
from megalite.training.trainer import Trainer
from tests.data.chats import write_tokenizer

TEXT = "abba and a cab: grüße, 日本語 " * 100


def prepared(text: str, tokenizer: str, **options: Any) -> None:
    Path("text.txt").write_text(text)
    sources = open_inputs(["text.txt"], exclude=[], file_format="auto", text_key="text", split="train")
    prepare(sources, Path("data/x"), tokenizer, **options)


def configured() -> Config:
    model = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 400,
    }
    data, train = (
        {"train": "data/x", "sequence_length": 16},
        {"steps": 4, "global_batch_size": 2, "micro_batch_size": 2},
    )
    tree = {
        "run": {"dir": "runs", "name": "run"},
        "model": {**model, "max_position_embeddings": 64},
        "parallel": {"dp": 1},
    }
    return from_dict({**tree, "data": data, "train": train, "checkpoint": {}})


def trained(config: Config) -> None:
    trainer = Trainer(config, build.make_mesh(config))
    trainer.step()
    trainer.save()
    trainer.close()
    job, _ = begin(config, restarted=False)
    job.running(1)
    job.end(ExitStatus.DONE)


def sentencepiece() -> str:
    prepared(TEXT, "data/x.model", train_tokenizer=300)
    return "data/x.model"


def huggingface() -> str:
    prepared(TEXT, str(write_tokenizer(Path("hf"))))
    return "hf"


def copies() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path("runs/run").glob("tokenizer*/*")}


@pytest.mark.parametrize(("kind", "place"), [(sentencepiece, "tokenizer/x.model"), (huggingface, "tokenizer")])
def test_a_model_is_used_with_the_copy_of_its_run(kind: Callable[[], str], place: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = kind()
    ids, identity = load(name).encode(TEXT), fingerprint(load(name))
    trained(config := configured())
    files = [Path(name)] if Path(name).is_file() else sorted(Path(name).iterdir())
    expected = {f"runs/run/tokenizer/{file.name}": file.read_bytes() for file in files}
    assert copies() == expected and expected
    keep(config.data, Path("runs/run"))
    assert copies() == expected, "stored once"
    assert tokenizer_of(open_source("runs/run"), None).name == str(Path(name).resolve()), (
        "the original as long as it is there"
    )

    shutil.rmtree("hf", ignore_errors=True)
    prepared(TEXT[:999] + "other words, other pieces " * 50, "data/x.model", train_tokenizer=310, overwrite=True)
    source, copy = open_source("runs/run"), (tmp_path / "runs" / "run" / place)
    assert tokenizer_of(source, None).encode(TEXT) == ids
    with pytest.raises(ConfigError, match=rf"Pass the tokenizer used in training, {copy}, with --tokenizer"):
        tokenizer_of(source, "data/x.model")
    with pytest.raises(
        ConfigError,
        match=rf"uses a different tokenizer than checkpoint\.load.* id \d+ was .*Use data prepared with {copy}, or",
    ):
        check_tokenizers(config, "another")
    assert convert.main(["export", "runs/run", "out"]) == 0
    assert fingerprint(load("out")) == identity

    shutil.rmtree("data")
    assert tokenizer_of(source, None).encode(TEXT) == ids
    shutil.rmtree("runs/run/tokenizer")
    with pytest.raises(ConfigError, match="the tokenizer of the training data cannot be read"):
        tokenizer_of(open_source("runs/run"), None)


def test_what_did_not_make_the_data_is_not_stored_and_a_second_one_is_stored_beside_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, data = Path("runs/run"), configured().data
    run.mkdir(parents=True)
    prepared(TEXT, "byte")
    keep(data, run)
    sentencepiece_options = {"train_tokenizer": 300, "overwrite": True}
    prepared(TEXT, "data/x.model", **sentencepiece_options)
    model = Path("data/x.model").read_bytes()
    Path("data/x.model").write_bytes(model + b"changed")
    keep(data, run)
    assert copies() == {}
    Path("data/x.model").write_bytes(model)
    keep(data, run)
    prepared(TEXT + "more of it " * 99, "data/x.model", **sentencepiece_options)
    keep(data, run)
    assert copies() == {
        "runs/run/tokenizer/x.model": model,
        "runs/run/tokenizer-2/x.model": Path("data/x.model").read_bytes(),
    }
    assert not list(run.glob(".tokenizer*"))
    keep(data, Path("not/there"))
