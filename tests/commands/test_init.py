"""megalite init: what it writes is what a run accepts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from megalite.commands.dry_run import main as dry_run
from megalite.commands.init import main
from megalite.data.preparation.writer import IndexedWriter
from megalite.launch import machine
from tests.data.conftest import write_by_hand
from tests.families.hub_cache import SHAPE, hub_cache, store


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "gpus", lambda: [])


def refusal(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code == 2
    return capsys.readouterr().err


def written(capsys, *words: str) -> tuple[dict, str]:
    """The file as data, after a run has accepted it; and what the command printed."""
    main(["--output", "run.yaml", *words])
    printed = capsys.readouterr().out
    dry_run(["--dry_run", "--config", "run.yaml", "--json"])
    content = json.loads(capsys.readouterr().out)
    tree = yaml.safe_load(Path("run.yaml").read_text())
    assert content["world_size"] == tree["parallel"]["tp"] * tree["parallel"]["pp"] * tree["parallel"]["dp"]
    return tree, printed


def test_a_configuration_for_this_cpu(capsys):
    tree, printed = written(capsys, "--from", "tiny", "--steps", "40")
    assert tree["parallel"] == {"tp": 1, "pp": 1, "dp": 1, "zero": 1, "schedule": "1f1b"}
    assert (
        tree["model"] == {"preset": "tiny", "vocab_size": 32768}
        and tree["train"]["steps"] == 40
        and "precision" not in tree["train"]
    )
    assert "prepare" in printed and "--config run.yaml --dry_run" in printed, "the next commands"
    text = Path("run.yaml").read_text()
    assert "# Number of optimizer steps of the whole run." in text and max(map(len, text.splitlines())) <= 140


def test_a_configuration_for_eight_planned_gpus(capsys):
    tree, printed = written(
        capsys, "--from", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--tokens", "1e9", "--sequence_length", "8192"
    )
    sizes = tree["parallel"]
    assert (
        sizes["tp"] * sizes["pp"] * sizes["dp"] == 8 and tree["train"]["precision"] == "bf16" and "--nproc 8" in printed
    )
    tokens = tree["train"]["steps"] * tree["train"]["global_batch_size"] * tree["data"]["sequence_length"]
    assert 1e9 <= tokens < 1.01e9


def test_a_shipped_configuration_keeps_its_options(capsys):
    tree, _ = written(capsys, "--from", "shakespeare-char", "--data", "data/train")
    shipped = yaml.safe_load((Path(__file__).parents[2] / "configs" / "shakespeare-char.yaml").read_text())
    assert tree["optimizer"]["lr"] == shipped["optimizer"]["lr"] and tree["train"]["steps"] == shipped["train"]["steps"]


def test_data_that_are_there_give_vocabulary_and_epoch(capsys):
    with IndexedWriter(Path("tokens"), 257) as writer:
        writer.add(np.arange(300_000) % 257, [300_000])
        writer.finish({"vocab_size": 257, "eos": 256, "tokenizer": "byte", "tokens": 300_000})
    tree, printed = written(
        capsys, "--from", "tiny", "--data", "tokens", "--global_batch_size", "8", "--sequence_length", "128"
    )
    assert tree["train"]["steps"] == 300_000 // 1024 and tree["data"]["validation"] == 0.01 and "prepare" not in printed


def test_a_model_of_the_hub_keeps_its_name(tmp_path: Path, capsys):
    with hub_cache(tmp_path) as cache:
        store(cache, "org/name", {**SHAPE, "model.safetensors": ""})
        tree, _ = written(capsys, "--from", "org/name", "--weights")
        assert tree["model"] == {"from_hf": "org/name", "init_from": "hf:org/name"} and tree["optimizer"]["lr"] == 1e-5


def test_nothing_is_replaced_or_guessed(capsys):
    assert "--from is required" in refusal(capsys)
    assert "--gpu is required because this machine has no GPU" in refusal(capsys, "--from", "tiny", "--gpus", "8")
    assert "--from nothing is not a known model" in refusal(capsys, "--from", "nothing")
    Path("run.yaml").write_text("mine")
    assert "--output run.yaml already exists. Choose another path or pass --force" in refusal(capsys, "--from", "tiny")
    assert Path("run.yaml").read_text() == "mine"
    main(["--from", "tiny", "--force", "--json"])
    assert json.loads(capsys.readouterr().out)["written"] == "run.yaml" and Path("run.yaml").read_text() != "mine"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal("gpt2-124m\n\n2\na100\n"))
    monkeypatch.setattr("sys.stdout", Terminal())
    main([])
    tree = yaml.safe_load(Path("run.yaml").read_text())
    assert (
        tree["model"]["preset"] == "gpt2-124m" and tree["data"]["train"] == "data/train" and tree["parallel"]["dp"] == 2
    )


@pytest.mark.parametrize(
    "said, answers", [("--output run.yaml already exists", 0), ("--from gpt2-124 is not a known model", 1)]
)
def test_a_mistake_ends_the_questions(said, answers, monkeypatch: pytest.MonkeyPatch, capsys):
    """It is not told after answers that are then lost."""
    if not answers:
        Path("run.yaml").touch()
    monkeypatch.setattr("sys.stdin", Terminal("gpt2-124\n\n2\na100\n"))
    monkeypatch.setattr("sys.stdout", Terminal())
    assert said in refusal(capsys)
    assert len(sys.stdin.readlines()) == 4 - answers


def test_epochs_of_data_that_are_not_there_yet_stay_epochs(capsys):
    Path("own.yaml").write_text(
        "{model: {preset: gpt2-124m}, data: {sequence_length: 128}, train: {epochs: 2, global_batch_size: 8}}"
    )
    tree, printed = written(capsys, "--from", "own.yaml")
    assert (
        tree["train"]["epochs"] == 2 and "steps" not in tree["train"] and "2 epochs in steps of 1,024 tokens" in printed
    )


OWN = "model: {preset: gpt2-124m}\n"
SMALL = "data: {%ssequence_length: 5}\ntrain: {global_batch_size: 4, micro_batch_size: 4, %s}\n"


def test_amounts_are_read_as_a_plan_reads_them(capsys):
    tree, _ = written(
        capsys, "--from", "tiny", "--tokens", "1M", "--global_batch_size", "8", "--sequence_length", "100"
    )
    assert tree["train"]["steps"] == 1250
    for wrong in ("nan", "inf", "-5", "10X"):
        assert "is not a number of tokens" in refusal(capsys, "--from", "tiny", "--force", f"--tokens={wrong}")
    assert "not allowed with" in refusal(capsys, "--from", "tiny", "--force", "--tokens", "1M", "--steps", "5")


def test_a_configuration_keeps_its_options(capsys):
    Path("own.yaml").write_text(
        OWN + SMALL % ("train: {a: 0.5, b: 0.5}, ", "steps: 300") + "optimizer: {warmup_steps: 200}\n"
    )
    tree, printed = written(capsys, "--from", "own.yaml", "--gpus", "0")
    assert tree["data"]["train"] == {"a": 0.5, "b": 0.5} and "precision" not in tree["train"]
    assert tree["optimizer"]["warmup_steps"] == 200 and printed.count("prepare") == 2
    assert "optimizer.warmup_steps = 200 exceeds train.steps = 10" in refusal(
        capsys, "--from", "own.yaml", "--force", "--steps", "10"
    )


@pytest.mark.parametrize("warmup", [500, "5%"])
def test_a_warm_up_of_unknown_steps_is_kept(capsys, warmup: int | str):
    Path("own.yaml").write_text(OWN + SMALL % ("", "epochs: 3") + f"optimizer: {{warmup_steps: {warmup}}}\n")
    tree, _ = written(capsys, "--from", "own.yaml")
    assert (tree["train"]["epochs"], tree["optimizer"]["warmup_steps"]) == (3, warmup)


def test_epochs_are_those_of_the_data_given(capsys):
    for name, tokens in (("a", 101), ("b", 51)):
        write_by_hand(name, [list(range(tokens))], metadata={"vocab_size": 256, "eos": 255})
    Path("own.yaml").write_text(OWN + SMALL % ("train: a, ", "epochs: 2"))
    tree, _ = written(capsys, "--from", "own.yaml", "--data", "b")
    assert tree["train"]["steps"] == 5  # 2 · 10 / 4


def test_conversations_are_read_once(capsys):
    turns = [[1] * size for size in (6, 3, 4, 2, 5, 3, 2, 6) * 10]
    write_by_hand("c", turns, metadata={"vocab_size": 256, "eos": 255, "chat": {}, "tokens": 310})
    write_by_hand("c.loss", turns, code=1)
    tree, printed = written(
        capsys, "--from", "tiny", "--data", "c", "--sequence_length", "5", "--global_batch_size", "2"
    )
    assert tree["train"]["epochs"] == 1 and "steps" not in tree["train"] and "1 epoch in steps" in printed
    assert 0 < tree["checkpoint"]["interval"] < 10, "a tenth of about 25 steps"


@pytest.mark.parametrize("gpus, nodes, each", [(9, 3, 3), (20, 4, 5), (16, 2, 8)])
def test_the_start_command_starts_all_ranks(capsys, gpus: int, nodes: int, each: int):
    words = ["--from", "gpt2-124m", "--gpus", str(gpus), "--gpu", "h100", "--steps", "40", "--global_batch_size", "720"]
    _, printed = written(capsys, *words, "--sequence_length", "512")
    assert f"--nnodes {nodes} " in printed and f"--nproc-per-node {each} " in printed


def test_a_configuration_keeps_the_name_of_a_model_of_the_hub(tmp_path: Path, capsys):
    with hub_cache(tmp_path) as cache:
        store(cache, "org/name", SHAPE)
        Path("own.yaml").write_text("model: {from_hf: org/name}")
        tree, _ = written(capsys, "--from", "own.yaml", "--sequence_length", "128")
        assert tree["model"] == {"from_hf": "org/name"}


def test_says_that_data_are_few_and_words_unused(capsys):
    with IndexedWriter(Path("few"), 257) as writer:
        writer.add(np.arange(30_000) % 257, [30_000])
        writer.finish({"vocab_size": 257, "eos": 256, "tokenizer": "byte", "tokens": 30_000})
    _, printed = written(
        capsys, "--from", "llama-3.2-1b", "--data", "few", "--tokens", "30M", "--sequence_length", "100"
    )
    times = -(-30_000_000 // 3200) * 32 / 299  # 32 samples a step, of 299
    assert (
        f": few is read {times:,.0f} times (it has 299 samples, and the run takes " in printed
        and "give more data" in printed
    )
    assert "the data uses 257 of 128,256 ids" in printed
