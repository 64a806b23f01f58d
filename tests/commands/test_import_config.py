"""The commands that an imported configuration prints run as they are, and the configuration trains on what they
make."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.commands import prepare
from megalite.commands.import_config import main
from megalite.config.load import load_config
from megalite.config.schema import Config
from tests.data.chats import CHATML, LONG, SHORT, unmarked, write_lines, write_tokenizer

SHAPE = {
    **{
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    },
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 272,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
}
AXOLOTL = {
    "base_model": "MODEL",
    "micro_batch_size": 1,
    "sequence_len": 64,
    "max_steps": 2,
    "output_dir": "axolotl",
    "bf16": True,
}
FACTORY = {
    **{
        "model_name_or_path": "MODEL",
        "finetuning_type": "full",
        "cutoff_len": 64,
        "max_steps": 2,
        "per_device_train_batch_size": 1,
    },
    "dataset": "novels",
}
TUNE = {
    "model": {"_component_": "torchtune.models.llama3.llama3_8b"},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "MODEL"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 64},
    **{"batch_size": 1, "max_steps_per_epoch": 2, "epochs": 1},
}
TITAN = {
    "job": {"dump_folder": "titan"},
    "model": {"name": "llama3", "flavor": "debugmodel", "hf_assets_path": "MODEL"},
    "training": {"dataset": "novels", "local_batch_size": 1, "seq_len": 64, "steps": 2},
    "lr_scheduler": {"warmup_steps": 1},
}


@dataclass
class Case:
    """A configuration, what its command must have, whether the data is a chat or pairs of them, and what FILE stands
    for."""

    project: str
    content: dict[str, Any]
    has: str
    chat: bool = False
    file: str = ""
    pairs: bool = False


CASES = {
    "axolotl, completion": Case(
        "axolotl",
        AXOLOTL
        | {"datasets": [{"path": "books.jsonl", "type": "completion", "field": "chapter"}], "sample_packing": True},
        "--text_key chapter --input books.jsonl",
    ),
    "axolotl, text to pretrain on": Case(
        "axolotl",
        AXOLOTL
        | {"pretraining_dataset": [{"path": "json", "data_files": "lines of text.json"}], "sample_packing": True},
        "--format jsonl --input 'lines of text.json'",
    ),
    "axolotl, conversations": Case(
        "axolotl",
        AXOLOTL
        | {
            "datasets": [
                {
                    **{"path": "dialogs.jsonl", "type": "chat_template", "field_messages": "dialog"},
                    "message_property_mappings": {"role": "speaker", "content": "text"},
                }
            ],
            **{"sample_packing": True, "excess_length_strategy": "truncate", "train_on_inputs": True},
        },
        "--chat --keys messages=dialog,role=speaker,content=text --loss_on all --max_length 65 --too_long truncate",
        chat=True,
    ),
    "LLaMA-Factory, text": Case(
        "llama-factory", FACTORY | {"stage": "pt"}, "megalite prepare --input FILE", file="lines.jsonl"
    ),
    "LLaMA-Factory, conversations": Case(
        "llama-factory",
        FACTORY | {"stage": "sft", "cutoff_len": 257, "neat_packing": True, "train_on_prompt": True},
        "megalite prepare --chat --loss_on all --input FILE",
        chat=True,
        file="alpaca.json",
    ),
    "torchtune, text": Case(
        "torchtune",
        TUNE
        | {
            "dataset": {
                "_component_": "torchtune.datasets.text_completion_dataset",
                **{"source": "json", "data_files": "books.jsonl", "column": "chapter", "packed": True},
            }
        },
        "--text_key chapter --input books.jsonl",
    ),
    "torchtune, two sets of instructions": Case(
        "torchtune",
        TUNE
        | {
            "tokenizer": {"max_seq_len": 256},
            "dataset": [
                {
                    "_component_": "torchtune.datasets.alpaca_dataset",
                    "source": "json",
                    "data_files": "alpaca.json",
                    "packed": True,
                },
                {
                    **{
                        "_component_": "torchtune.datasets.instruct_dataset",
                        "source": "json",
                        "data_files": "pairs.jsonl",
                    },
                    "column_map": {"input": "question", "output": "answer"},
                },
            ],
        },
        "--keys instruction=question,output=answer --input pairs.jsonl --tokenizer MODEL --output PREFIX-2",
        chat=True,
    ),
    "TRL, pairs": Case(
        "trl-dpo",
        {"model_name_or_path": "MODEL", "dataset_name": "choices.jsonl", "max_length": 64, "max_steps": 2},
        "--preference --max_length 64 --too_long truncate --input choices.jsonl",
        chat=True,
        pairs=True,
    ),
    "torchtitan": Case(
        "torchtitan", TITAN | {"training": TITAN["training"] | {"dataset_path": "./texts"}}, "--input './texts/*'"
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with a model's configuration and tokenizer, and data of several forms."""
    directory = tmp_path_factory.mktemp("place")
    write_tokenizer(directory / "model", unmarked(CHATML))
    (directory / "model" / "config.json").write_text(json.dumps(SHAPE))
    texts = [f"A text of no great length, number {number}." for number in range(12)]
    write_lines(directory / "lines.jsonl", [{"text": text} for text in texts])
    write_lines(directory / "lines of text.json", [{"text": text} for text in texts])
    write_lines(directory / "books.jsonl", [{"chapter": text, "text": "not this"} for text in texts])
    dialogs = [[{"speaker": turn["role"], "text": turn["content"]} for turn in turns] for turns in (LONG, SHORT)]
    write_lines(directory / "dialogs.jsonl", [{"dialog": turns} for turns in dialogs] * 4)
    records = [{"instruction": f"Add 1 and {number}.", "input": "", "output": str(number + 1)} for number in range(9)]
    (directory / "alpaca.json").write_text(json.dumps(records))
    write_lines(
        directory / "pairs.jsonl", [{"question": each["instruction"], "answer": each["output"]} for each in records]
    )
    halves = ({"chosen": f" {number}", "rejected": f" {number + 1}"} for number in range(9))
    write_lines(directory / "choices.jsonl", [{"prompt": "Count:"} | half for half in halves])
    (directory / "texts").mkdir()
    (directory / "texts" / "one.txt").write_text(" ".join(texts))
    return directory


def imported(case: Case, capsys: Any) -> tuple[dict[str, Any], list[str]]:
    """The configuration of a file, and the `megalite prepare` commands among the remarks."""
    Path("config.yaml").write_text(yaml.safe_dump(case.content).replace("MODEL", "model"))
    main([case.project, "config.yaml", "--dp", "1", "--json"])
    reported = json.loads(capsys.readouterr().out)
    commands = [
        each
        for note in reported["notes"]
        for each in re.findall(r"`(megalite prepare [^`]*--output [^`]*)`", note["why"])
    ]
    return reported["config"], [*dict.fromkeys(commands)]


def prepared(command: str, file: str, monkeypatch: Any, number: int) -> str:
    """Run a command; the PREFIX that it makes, renamed so that each test has its own."""
    words = [file if word == "FILE" else word for word in shlex.split(command)]
    words[-1] = f"{words[-1]}-{number}"
    monkeypatch.setattr("sys.argv", [*words[1:], "--workers", "1"])
    prepare.main()
    return words[-1]


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_can_be_run(place, monkeypatch, capsys, name):
    """The configuration and the token files fit each other: a run accepts them."""
    case = CASES[name]
    monkeypatch.chdir(place)
    options, commands = imported(case, capsys)
    assert any(case.has.replace("MODEL", "model") in command for command in commands)
    data = [prepared(command, case.file, monkeypatch, list(CASES).index(name)) for command in commands]
    assert all(("chat" in json.loads(Path(f"{prefix}.json").read_text())) == case.chat for prefix in data)
    Path("emitted.yaml").write_text(yaml.safe_dump(options))
    config: Config = load_config(["--config", "emitted.yaml", "--data.train", *data], world_size=1)
    assert config.train.objective == ("dpo" if case.pairs else "cross_entropy")
    assert (config.data.packing, config.data.reset_positions) == (
        case.chat and not case.pairs,
        not case.chat and case.project in ("axolotl", "torchtune"),
    )


def test_a_configuration_for_text_trains(place, monkeypatch, capsys):
    """Two steps, on a text that the printed command made."""
    monkeypatch.chdir(place)
    options, (command,) = imported(CASES["axolotl, completion"], capsys)
    prefix = prepared(command, "", monkeypatch, len(CASES))
    Path("emitted.yaml").write_text(yaml.safe_dump(options))
    arguments = ["train", "--config", "emitted.yaml", "--data.train", prefix, "--model.init_from", "none"]
    done = subprocess.run([sys.executable, "-m", "megalite", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (summary,) = Path("axolotl").glob("*/summary.json")
    assert json.loads(summary.read_text())["step"] == 2
