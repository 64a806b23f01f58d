"""Amounts with units, and what a run's length becomes in steps, against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config.amounts import byte_size, count
from megalite.config.load import load_config
from megalite.config.samples import members, samples_per_epoch
from megalite.config.schema import Config
from megalite.config.sections.data import DataConfig
from megalite.config.token_files import read_often
from megalite.data.dataset import build
from megalite.training import dry_run
from tests.data.conftest import write_by_hand

SMALL = ["--train.global_batch_size", "4", "--train.micro_batch_size", "4", "--data.sequence_length", "5"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the texts a (101 tokens, 20 samples of 5) and b (51 tokens, 10 samples), and the conversations
    c."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, first, tokens in (("a", 0, 101), ("b", 101, 51)):
        documents = [list(range(first + i, first + min(i + 10, tokens))) for i in range(0, tokens, 10)]
        write_by_hand(tmp_path / name, documents, metadata={"vocab_size": 256, "eos": 255})
    turns = [[1] * size for size in (6, 3, 4, 2, 5, 3, 2, 6)]
    write_by_hand(tmp_path / "c", turns, metadata={"vocab_size": 256, "eos": 255, "chat": {}})
    write_by_hand(tmp_path / "c.loss", turns, code=1)
    return tmp_path


def load(*argv: str, text: str | None = None) -> Config:
    if text is not None:
        Path("run.yaml").write_text(text)
        argv = ("--config", "run.yaml", *argv)
    return load_config(["--data.train", "a", *SMALL, *argv], world_size=1)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, text: str | None = None) -> str:
    with pytest.raises(SystemExit) as end:
        load(*argv, text=text)
    assert end.value.code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("300", 300),
        ("20k", 20_000),
        ("1.5M", 1_500_000),
        ("10B", 10**10),
        ("2 t", 2 * 10**12),
        ("1.5e9", 1_500_000_000),
        ("1_000", 1000),
    ]
    + [("1.5", None), ("0.0015k", None), ("10X", None), ("10GB", None), ("", None), ("k", None)],
)
def test_counts(text: str, number: int | None) -> None:
    assert count(text) == number


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("512MB", 512_000_000),
        ("5GB", 5 * 10**9),
        ("1GiB", 1 << 30),
        ("1.5 KiB", 1536),
        ("2tb", 2 * 10**12),
        ("7B", 7),
    ]
    + [("5G", None), ("1e", None), ("", None), ("MB", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize(
    ("argv", "option", "value"),
    [
        (["--train.steps", "2k"], "train.steps", 2000),
        (["--train.steps", "1e3"], "train.steps", 1000),
        (["--train.tokens", "2k"], "train.steps", 100),  # 2000 / (4 · 5)
        (["--train.tokens", "2001"], "train.steps", 101),
        (["--train.epochs", "3"], "train.steps", 15),  # 3 · 20 / 4
        (["--train.epochs", "0.5"], "train.steps", 3),  # 10 / 4
        (["--train.epochs", "0.6"], "train.steps", 3),  # 12 / 4, exactly
        (["--optimizer.warmup_steps", "5%"], "optimizer.warmup_steps", 5),
        (["--optimizer.warmup_steps", "0.05"], "optimizer.warmup_steps", 5),
        (["--optimizer.warmup_steps", "2.5%", "--train.epochs", "40"], "optimizer.warmup_steps", 5),  # of 200
        (["--optimizer.warmup_steps", "7"], "optimizer.warmup_steps", 7),
        (["--optimizer.decay", "wsd", "--optimizer.wsd_decay_fraction", "20%"], "optimizer.wsd_decay_fraction", 0.2),
        (["--data.validation", "25%"], "data.validation", 0.25),
        (["--checkpoint.interval", "1k"], "checkpoint.interval", 1000),
        (["--parallel.bucket_mb", "50MB"], "parallel.bucket_mb", 50.0),
        (["--parallel.bucket_mb", "1MiB"], "parallel.bucket_mb", 1.048576),
        (["--parallel.bucket_mb", "12.5"], "parallel.bucket_mb", 12.5),
        (["--train.memory_budget", "64GiB", "--train.recompute", "budget"], "train.memory_budget", float(64 << 30)),
        (["--train.memory_budget", "90%", "--train.recompute", "budget"], "train.memory_budget", 0.9),
        (["--train.memory_budget", "0.9", "--train.recompute", "budget"], "train.memory_budget", 0.9),
        (["--run.timeout", "1h30m"], "run.timeout", "1h30m"),
        (["--train.watchdog", "null"], "train.watchdog", None),
    ],
)
def test_amounts_are_resolved_alike_from_command_line_and_yaml(argv: list[str], option: str, value: Any) -> None:
    def value_of(config: Config) -> Any:
        section, key = option.split(".")
        return getattr(getattr(config, section), key)

    tree: dict[str, dict[str, Any]] = {}
    for name, word in zip(argv[::2], argv[1::2], strict=True):
        section, key = name.removeprefix("--").split(".")
        tree.setdefault(section, {})[key] = yaml.safe_load(word)
    for config in (load(*argv), load(text=yaml.safe_dump(tree))):
        assert value_of(config) == value and type(value_of(config)) is type(value)
        assert config.train.tokens is None and config.train.epochs is None


def test_epochs_of_a_token_file_in_a_store(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_CACHE", str(here / "cache"))
    config = load("--data.train", f"file://{here}/a", "--train.epochs", "3", "--optimizer.warmup_steps", "20%")
    assert (config.train.steps, config.train.epochs, config.optimizer.warmup_steps) == (15, None, 3)


def test_a_resolved_configuration_has_steps_and_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--train.epochs", "3", "--optimizer.warmup_steps", "20%")
    with pytest.raises(SystemExit):
        load(*argv, "--print_config")
    printed = capsys.readouterr().out
    tree = yaml.safe_load(printed)
    assert (tree["train"]["steps"], tree["train"]["epochs"], tree["optimizer"]["warmup_steps"]) == (15, None, 3)
    assert load(text=printed) == load(*argv) == load("--train.steps", "15", "--optimizer.warmup_steps", "3")
    assert load("--train.epochs", "5", text=printed).train.steps == 25, (
        "the stored configuration of a run does not stand in the way"
    )


def test_epochs_of_data_that_is_not_there_compare_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        *SMALL,
        "--data.train",
        "gone",
        "--train.epochs",
        "3",
        "--model.preset",
        "tiny",
        "--model.vocab_size",
        "256",
    ]
    for warmup in (["500"], ["500", "--optimizer.decay", "wsd"]):
        config = dry_run.read([*argv, "--optimizer.warmup_steps", *warmup], 1)
        assert (config.train.epochs, config.optimizer.warmup_steps) == (3, 500)
    with pytest.raises(SystemExit):
        load(*argv, "--optimizer.warmup_steps", "5%", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["train"]["epochs"], printed["optimizer"]["warmup_steps"]) == (3, "5%")


def test_a_later_source_says_how_long_the_run_is() -> None:
    text = "train: {epochs: 2}\noptimizer: {warmup_steps: 10%}"
    assert load(text=text).train.steps == 10
    config = load("--train.steps", "70", text=text)
    assert (config.train.steps, config.optimizer.warmup_steps) == (70, 7)
    assert load("--train.tokens", "400", text=text).train.steps == 20
    assert load("--train.epochs", "4", text="train: {steps: 3, tokens: null}").train.steps == 20


def test_a_plan_tells_which_member_is_read_many_times(here: Path) -> None:
    """b has 10 samples of 5 tokens, of which 1,000 steps of 4 samples read 800: a fifth of them."""
    config = load("--train.steps", "1000", "--train.global_batch_size", "4")
    config.data = DataConfig(train={"a": 0.8, "b": 0.2}, sequence_length=5)
    said = [line.partition(" times")[0] for line in read_often(config)]
    assert said == ["train.steps = 1,000: a is read 160", "train.steps = 1,000: b is read 80"]
    config.train.steps = 200
    assert [line.partition(" times")[0] for line in read_often(config)] == ["train.steps = 200: a is read 32"], (
        "b is read 16 times"
    )


def test_an_epoch_is_one_pass_of_the_dataset(here: Path) -> None:
    """From the indices alone: the numbers that follow by hand, which are also those of the datasets."""
    cases = {
        "text": (DataConfig(train="a"), 20),
        "list": (DataConfig(train=["a", "b"]), 30),  # (152 - 1) // 5
        # of 30 tokens, from the start of a document at 80: (80 - 1) // 5
        "held out": (DataConfig(train="a", validation=0.3), 15),
        # a, b, a, b …: b's eleventh sample is the one of index 21
        "blend": (DataConfig(train={"a": 1.0, "b": 1.0}), 21),
        "conversations": (DataConfig(train="c"), 8),
        "packed": (DataConfig(train="c", packing=True), 5),  # 5 | 5 | 4 + 1 | 3 + 2 | 2 + 1
        "packed, held out": (DataConfig(train="c", packing=True, validation=0.25), 4),  # 5 | 4 + 1 | 3 + 2 | 2
    }
    for name, (data, expected) in cases.items():
        data.sequence_length = 5
        dataset = build(data, seed=1)[0]
        assert samples_per_epoch(data) == dataset.samples_per_epoch == expected, name
        assert members(data) == dataset.members, name
        if data.train != "c":
            assert len({dataset[i].tokens.tobytes() for i in range(expected)}) == expected, (
                f"{name}: no sample is repeated within an epoch"
            )


@pytest.mark.parametrize(
    ("argv", "text", "says"),
    [
        (
            ["--train.tokens", "10X"],
            None,
            "train.tokens = 10X on the command line is not a number of tokens. Expected 300M, 10B, 1.5T or 1.5e9.",
        ),
        (
            [],
            "train: {steps: 1.5}",
            "train.steps = 1.5 in run.yaml is not a number of steps. Expected 300, 20k or 1.5M.",
        ),
        (["--optimizer.warmup_steps", "1.5"], None, "Expected 200, 2k, or a share of train.steps: 5% or 0.05."),
        (
            ["--train.memory_budget", "150%"],
            None,
            "train.memory_budget = 150% on the command line is not a size or a share of the device.",
        ),
        (
            ["--parallel.bucket_mb", "5G"],
            None,
            "parallel.bucket_mb = 5G on the command line is not a size. Expected 25MB, 32MiB, or 25,",
        ),
        (
            [],
            "run: {timeout: 600}",
            "run.timeout = 600 in run.yaml is not a duration. Expected it with a unit: 600s, 600m or 600h.",
        ),
        (
            ["--train.steps", "5", "--train.epochs", "1"],
            None,
            "train.steps = 5 and train.epochs = 1.0 on the command line both set the length of the run. "
            "Set only one of them.",
        ),
        ([], "train: {tokens: 1M, epochs: 2}", "train.tokens = 1000000 and train.epochs = 2.0 in run.yaml both set"),
        (
            ["--train.epochs", "3", "--data.train", "gone"],
            None,
            "data.train = gone does not exist: could not find gone.bin and gone.idx.",
        ),
        (
            ["--train.epochs", "3", "--data.train", 300 * "a"],
            None,
            f"a does not exist: could not find {300 * 'a'}.bin and",
        ),
        (["--data.validation", 300 * "a"], None, f"a does not exist: could not find {300 * 'a'}.bin and"),
        (["--checkpoint.load", 300 * "a"], None, "a is neither auto nor none, nor a checkpoint"),
        (["--train.epochs", "0"], None, "train.epochs = 0.0 is not a positive number."),
        (
            ["--train.epochs", "1", "--data.sequence_length", "200"],
            None,
            "needs 201 tokens for one sample, and a gives 101.",
        ),
        (["--train.epochs", "1", "--data.train", "{a: 1, b: -1}"], None, "data.train = "),
        (["--optimizer.warmup_steps", "150%"], None, "optimizer.warmup_steps = 150 exceeds train.steps = 100."),
        (["--train.steps", "1e400"], None, "train.steps = 1e400 on the command line is not a number of steps."),
        (["--train.tokens", "1e-99999999"], None, "is not a number of tokens."),
        (["--run.seed", "1" + 400 * "0"], None, "is too large."),
        (["--optimizer.lr", "1" + 400 * "0"], None, "is not a number."),
        (["--num_train_epochs", "3"], None, "The option is called --train.epochs."),
        (
            ["--warmup_ratio", "0.1"],
            None,
            "The option is called --optimizer.warmup_steps, a share of train.steps such as 5% or 0.05.",
        ),
    ],
)
def test_what_can_not_be_read_is_one_message(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str | None, says: str
) -> None:
    printed = refusal(capsys, *argv, text=text)
    assert says in printed and "\n" not in printed
