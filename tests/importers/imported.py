"""What the tests of imported configurations share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from megalite.commands.import_config import main
from megalite.config.load import load_config
from megalite.config.schema import Config
from megalite.config.values import nest
from tests.data.conftest import write_by_hand

TOKENS = 40_000
"""Length of the text on which an imported configuration is loaded."""


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]


def load(path: Path, options: dict[str, Any]) -> Config:
    """What pretrain.py makes of an emitted file, beside data, a model and what else the file leaves open."""
    metadata = {"vocab_size": 256} | ({"chat": {}} if options.get("data.packing") else {})
    write_by_hand(path.parent / "tokens", [[1] * TOKENS], metadata=metadata)
    dp = options.get("parallel.dp", options.get("parallel.dp_shard", 1))
    ours: dict[str, Any] = {"data.train": path.parent / "tokens", "model.vocab_size": 256}
    before = path.with_name("before.yaml")  # a preset on the command line would replace the file's shape
    shaped = {"model.preset", "model.from_hf", "model.hidden_size"} & options.keys()
    before.write_text("" if shaped else "model: {preset: tiny, max_position_embeddings: 131072}")
    ours |= {"train.micro_batch_size": 1} | ({} if "train.epochs" in options else {"train.steps": 10_000})
    ours["train.global_batch_size"] = dp * options.get("train.micro_batch_size", 1)
    words = [f"--{option}={value}" for option, value in ours.items() if option not in options]
    world = dp * options.get("parallel.tp", 1) * options.get("parallel.pp", 1) * options.get("parallel.cp", 1)
    return load_config(["--config", str(before), "--config", str(path), *words], world_size=world)


def reported(capsys: Any, *arguments: object) -> tuple[dict[str, Any], dict[str, str], dict[str, dict[str, str]]]:
    """The emitted options, section.key → value; what is not honoured; and the notes by kind, each key → reason."""
    main([*map(str, arguments), "--json"])
    report = json.loads(capsys.readouterr().out)
    options = {
        f"{section}.{key}": value for section, content in report["config"].items() for key, value in content.items()
    }
    notes: dict[str, dict[str, str]] = {}
    for note in report["notes"]:
        notes.setdefault(note["kind"], {})[note["key"]] = note["why"]
    return options, {lost["key"]: lost["why"] for lost in report["not_honoured"]}, notes


def imported(
    capsys: Any, directory: Path, *arguments: object
) -> tuple[dict[str, Any], dict[str, str], dict[str, dict[str, str]], Config]:
    """What is reported, and the loaded configuration.

    Asserts that the configuration says what the options say.
    """
    options, lost, notes = reported(capsys, *arguments)
    (directory / "emitted.yaml").write_text(yaml.safe_dump(nest(options)))
    config = load(directory / "emitted.yaml", options)
    plain = {
        option: value for option, value in options.items() if option != "train.epochs" and not str(value).endswith("%")
    }
    assert {option: attrgetter(option)(config) for option in plain} == plain
    return options, lost, notes, config
