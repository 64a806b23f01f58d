"""A run does not continue or start from what another tokenizer of the same size made, and says how to accept it where
one knows better."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megalite.assembly import parts as build
from megalite.checkpoint import manifest_of
from megalite.commands.generate import main as generate
from megalite.commands.train import check_run
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, load_config
from megalite.config.schema import Config
from megalite.data.dataset import build as open_data
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.tokenizer.identity import of_token_file
from megalite.data.tokenizer.tokenizers import load
from megalite.huggingface.convert import export_model, import_model
from megalite.training.tokenizer_checks import check_tokenizers
from megalite.training.trainer import Trainer
from tests.data.chats import write_tokenizer

VOCAB = 261


class World(NamedTuple):
    """Two tokenizers of one size, data prepared with each, a Hugging Face model that came with the first, and a run on
    its data."""

    tokenizers: tuple[Path, Path]
    data: tuple[str, str]
    model: Path
    run: Path


def exchange(directory: Path, one: str, other: str) -> None:
    """Exchange the ids of two pieces."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    path.write_text(json.dumps(content))


def options(train: str, place: Path, **sections: dict[str, Any]) -> Config:
    model = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
    }
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(place), "name": "run"},
        "model": model,
        "parallel": {"dp": 1},
        "data": {"train": train, "sequence_length": 16},
        "train": {"steps": 4, "global_batch_size": 2, "micro_batch_size": 2},
        "checkpoint": {},
    }
    return from_dict({name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}})


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    place = tmp_path_factory.mktemp("world")
    one, other = write_tokenizer(place / "one"), write_tokenizer(place / "other")
    exchange(other, "a", "b")
    (place / "text.txt").write_text("abba and a cab " * 200)
    prefixes = [str(place / f"data_{directory.name}") for directory in (one, other)]
    for directory, prefix in zip((one, other), prefixes, strict=True):
        sources = open_inputs([str(place / "text.txt")], exclude=[], file_format="auto", text_key="text", split="train")
        prepare(sources, Path(prefix), str(directory))
    trainer = Trainer(config := options(prefixes[0], place / "runs"), build.make_mesh(config))
    trainer.step()
    trainer.save()
    trainer.close()
    run, model = place / "runs" / "run", place / "model"
    export_model(run / "checkpoints" / "step_00000001", model)
    for file in one.iterdir():
        shutil.copy(file, model)
    return World((one, other), (prefixes[0], prefixes[1]), model, run)


def checked(config: Config) -> list[str]:
    return check_tokenizers(config, open_data(config.data, config.run.seed)[0].fingerprint)


STARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "resume": (
        "checkpoint.load = {run}/checkpoints/step_00000001",
        {"checkpoint": {"load": "{run}", "allow": ["data"]}},
    ),
    "weights of a run": ("model.init_from = {run}", {"model": {"init_from": "{run}"}}),
    "weights of a model": (
        "model.init_from = hf:{model}",
        {"model": {"init_from": "hf:{model}", "from_hf": "{model}"}},
    ),
    "weights of an import": ("model.init_from = {imported}", {"model": {"init_from": "{imported}"}}),
    "shape of a model": ("model.from_hf = {model}", {"model": {"from_hf": "{model}"}}),
    "an adapter": ("lora.init_from = {tokenizer}", {"lora": {"rank": 4, "init_from": "{tokenizer}"}}),
}


def filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: filled(each, names) for key, each in value.items()}
    return value.format(**names) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def names(world, tmp_path_factory) -> dict[str, str]:
    imported = tmp_path_factory.mktemp("imports") / "imported"
    import_model(world.model, imported)
    return {
        "run": str(world.run),
        "model": str(world.model),
        "imported": str(imported),
        "tokenizer": str(world.tokenizers[0]),
    }


@pytest.mark.parametrize("name", STARTS)
def test_what_another_tokenizer_made_is_refused_by_name(name, world, names, tmp_path):
    option, sections = filled(STARTS[name][0], names), filled(STARTS[name][1], names)
    assert checked(options(world.data[0], tmp_path, **sections)) == []
    config = options(world.data[1], tmp_path, **sections)
    with pytest.raises(ConfigError) as caught:
        checked(config)
    said = str(caught.value)
    a, b = (load(world.tokenizers[0]).encode(letter)[0] for letter in "ab")
    assert said.startswith(f"data.train = {world.data[1]} uses a different tokenizer than {option} (")
    assert f'id {a} was "a" and is now "b"; id {b} was "b" and is now "a". Use data prepared with ' in said
    assert said.endswith(", or use data.allow_tokenizer_change=true to continue anyway.")
    config.data.allow_tokenizer_change = True
    (note,) = checked(config)
    assert option in note and note.endswith("continuing because of data.allow_tokenizer_change=true")


def test_a_tokenizer_with_added_tokens_is_that_of_the_model_and_resizes_it(world, names, tmp_path, capsys):
    """From the two files to the export: which tokens were added is said, rows are added, and transformers reads all of
    it."""
    from transformers import AutoConfig, AutoTokenizer

    added = tmp_path / "added"
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizers[0])
    tokenizer.add_tokens(["<tool>", "abba"])
    tokenizer.save_pretrained(added)
    (tmp_path / "text.txt").write_text("abba and a <tool> cab " * 200)
    prefix = str(tmp_path / "data")
    sources = open_inputs([str(tmp_path / "text.txt")], exclude=[], file_format="auto", text_key="text", split="train")
    prepare(sources, Path(prefix), str(added))
    given = {
        "model.from_hf": names["model"],
        "model.init_from": f"hf:{names['model']}",
        "data.train": prefix,
        "run.dir": str(tmp_path),
    }
    given |= {"data.sequence_length": "16", "train.steps": "1", "train.global_batch_size": "4"}
    shape = [word for option, value in given.items() for word in (f"--{option}", value)]
    for more in ([], ["--model.vocab_size", str(VOCAB + 2)]):
        with pytest.raises(SystemExit) as ended:
            check_run(load_config([*shape, *more], world_size=1))
        assert ended.value.code == 2 and "model.resize_embeddings" in capsys.readouterr().err
    config = load_config([*shape, "--model.resize_embeddings", "mean"], world_size=1)
    assert config.model.vocab_size == VOCAB + 2
    notes = checked(config)
    assert [
        note
        for note in notes
        if "adds 2 tokens to the tokenizer of model.init_from" in note and '"<tool>", "abba"' in note
    ], notes
    trainer = Trainer(config, build.make_mesh(config))
    trainer.step()
    saved = trainer.save()
    trainer.close()
    export_model(saved, tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").vocab_size == len(exported) == VOCAB + 2
    assert exported.encode("abba<tool>", add_special_tokens=False) == [VOCAB + 1, VOCAB]


def test_a_run_ends_with_the_message_before_it_starts(world, names, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        check_run(options(world.data[1], tmp_path, model={"init_from": names["run"]}))
    assert ended.value.code == 2 and "uses a different tokenizer than model.init_from" in capsys.readouterr().err


def test_the_trainer_refuses_it_too(world):
    config = options(world.data[1], world.run.parent, checkpoint={"allow": ["data"]})
    with pytest.raises(ConfigError, match="uses a different tokenizer than checkpoint.load"):
        Trainer(config, build.make_mesh(config))
    config.data.allow_tokenizer_change = True
    trainer = Trainer(config, build.make_mesh(config))
    trainer.close()
    assert trainer.step_done == 1


def test_a_checkpoint_knows_the_tokenizer(world):
    state = manifest_of(world.run / "checkpoints" / "step_00000001").state
    recorded, data = state["tokenizer"], of_token_file(world.data[0])
    assert recorded == {
        "name": str(world.tokenizers[0]),
        "fingerprint": data.fingerprint,
        "digest": data.digest,
        "template_hash": None,
    }


def test_what_is_from_before_is_accepted_with_a_note(world, tmp_path):
    """Data without a record against a model that has one; where neither is known there is nothing to say."""
    for end in ("bin", "idx"):
        shutil.copy(f"{world.data[0]}.{end}", tmp_path / f"old.{end}")
    (tmp_path / "old.json").write_text(json.dumps({"vocab_size": VOCAB, "eos": 257}))
    old = str(tmp_path / "old")
    (note,) = checked(options(old, tmp_path, model={"init_from": str(world.run)}))
    assert (
        note == f"the tokenizer of data.train = {old} is unknown, so it was not compared with "
        f"the tokenizer of model.init_from = {world.run}"
    )
    assert checked(options(old, tmp_path)) == []


def test_a_text_is_not_read_with_another_tokenizer(world, capfd):
    """generate and evaluate, by name; and where the training data's own tokenizer has been replaced."""
    arguments = [str(world.run), "--prompt", "ab", "--tokens", "1", "--tokenizer"]
    assert generate([*arguments, str(world.tokenizers[0])]) == 0
    with pytest.raises(SystemExit):
        generate([*arguments, str(world.tokenizers[1])])
    said = capfd.readouterr().err
    assert f"--tokenizer {world.tokenizers[1]} is not the tokenizer of {world.run}/checkpoints/step_00000001" in said
    assert f"Pass the tokenizer used in training, {world.tokenizers[0]}, with --tokenizer" in said
    assert 'was "a" and is now "b"' in said and said.endswith("or use --allow_tokenizer_change to continue anyway.\n")
    assert generate([*arguments, str(world.tokenizers[1]), "--allow_tokenizer_change"]) == 0
    assert "continuing because of --allow_tokenizer_change" in capfd.readouterr().err
