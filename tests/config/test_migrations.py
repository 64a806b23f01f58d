"""Former names of options and values: read everywhere, with advice where a person has written them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megalite.config import load as loading
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, load_config, to_dict
from megalite.config.schema import Config
from megalite.training.resume_checks import changes, is_same_run

CASES = {
    "a name": ("train.fp32_products", "mkl", "train.fp32_matmul", "mkl", "train.fp32_products {} is train.fp32_matmul"),
    "a value": ("train.grad_dtype", "wide", "train.grad_dtype", "fp32", "train.grad_dtype = wide {} is fp32"),
    "another": (
        "parallel.reduce_dtype",
        "wide",
        "parallel.reduce_dtype",
        "fp32",
        "parallel.reduce_dtype = wide {} is fp32",
    ),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name in ("tokens.bin", "tokens.idx"):
        Path(name).touch()
    Path("tokens.json").write_text('{"vocab_size": 257, "eos": 256}')
    loading._print_once.cache_clear()


def load(*words: str) -> Config:
    return load_config(["--data.train", "tokens", *words], world_size=1)


def value(config: Config, option: str) -> object:
    section, key = option.split(".")
    return to_dict(config)[section][key]


def tree(option: str, content: str) -> dict[str, dict[str, str]]:
    section, key = option.split(".")
    return {section: {key: content}}


@pytest.mark.parametrize("former, old, option, new, advice", CASES.values(), ids=CASES)
def test_files_and_command_lines_are_read_with_advice(former, old, option, new, advice, capsys, monkeypatch):
    assert value(load(f"--{former}", old), option) == new
    assert capsys.readouterr().err == f"{advice.format('on the command line')} now.\n"
    Path("run.yaml").write_text(yaml.safe_dump(tree(former, old)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert value(load("--config", "run.yaml"), option) == new
    assert capsys.readouterr().err == "", "only local rank 0 prints"
    monkeypatch.delenv("LOCAL_RANK")
    for _ in range(2):
        assert value(load("--config", "run.yaml"), option) == new
    assert capsys.readouterr().err == f"{advice.format('in run.yaml')} now.\n"


@pytest.mark.parametrize("former, old, option, new, advice", CASES.values(), ids=CASES)
def test_a_stored_configuration_is_read_without_a_word(former, old, option, new, advice, capsys):
    stored = tree(former, old)
    assert value(from_dict(stored), option) == new
    config = from_dict(tree(option, new))
    assert is_same_run(config, stored)
    assert changes(config, {"config": stored}, {}) == []
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/config.yaml").write_text(yaml.safe_dump(stored))
    assert value(load("--config", "run/config.yaml"), option) == new
    assert capsys.readouterr().err == ""


def test_a_later_source_wins_under_either_name():
    Path("run.yaml").write_text("train: {fp32_products: mkl}")
    assert load("--config", "run.yaml", "--train.fp32_matmul", "onednn").train.fp32_matmul == "onednn"
    Path("run.yaml").write_text("train: {fp32_matmul: mkl}")
    assert load("--config", "run.yaml", "--train.fp32_products=onednn").train.fp32_matmul == "onednn"


def test_both_names_in_one_place_are_rejected():
    with pytest.raises(ConfigError, match=r"train.fp32_products in the configuration was renamed .* Remove"):
        from_dict({"train": {"fp32_products": "mkl", "fp32_matmul": "mkl"}})
