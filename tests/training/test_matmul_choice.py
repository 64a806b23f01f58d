"""The library of fp32 products: measured once, the same on every rank, kept by a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.launch import matmul_library
from megalite.mesh.layout import Layout
from megalite.mesh.mesh import Mesh
from megalite.training.matmul_choice import FILE, choose, step_products
from tests.support import jobs_parts

CPU = torch.device("cpu")


def config(directory: Path, name: str = "a", **sections: dict[str, Any]) -> Config:
    tree = {"run": {"dir": str(directory), "name": name}, "parallel": {"dp": 1}, **sections}
    tree["run"] = {"dir": str(directory), "name": name, **sections.get("run", {})}
    tree["model"] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tree["data"] = {"train": "x", "sequence_length": 8}
    return from_dict(tree)


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that the measurement finds; it fails where the test has set none."""
    seconds: dict[str, float] = {}
    monkeypatch.setattr(matmul_library, "measure", lambda _, paths: {path: seconds[path] for path in paths})
    monkeypatch.setattr(matmul_library, "rounds", lambda: False)
    return seconds


def chosen(run_config: Config) -> str:
    """The setting of this process after the choice."""
    torch.set_float32_matmul_precision("high")  # neither
    choose(run_config, Mesh(Layout.of(run_config)), CPU)
    return torch.get_float32_matmul_precision()


MKL, ONEDNN, UNTOUCHED = "highest", "medium", "high"


@pytest.mark.parametrize(("mkl", "setting"), [(0.5, MKL), (0.95, ONEDNN), (2.0, ONEDNN)])
def test_the_faster_one_is_used_recorded_and_kept(mkl, setting, measured, tmp_path):
    measured |= {"onednn": 1.0, "mkl": mkl}
    assert chosen(config(tmp_path)) == setting
    assert json.loads((tmp_path / "a" / FILE).read_text())["seconds"] == measured
    measured.clear()  # so that measuring again fails
    assert chosen(config(tmp_path)) == setting
    assert chosen(config(tmp_path, checkpoint={"load": "none"})) == setting


def test_the_file_of_an_earlier_version_is_kept(measured, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "products.json").write_text('{"path": "mkl", "option": "auto", "reason": "", "seconds": {}}')
    assert chosen(config(tmp_path)) == MKL
    assert not (tmp_path / "a" / FILE).exists()


def test_a_run_that_continues_anothers_checkpoint_keeps_its_library(measured, tmp_path):
    measured |= {"onednn": 1.0, "mkl": 0.5}
    chosen(config(tmp_path))
    (checkpoint := tmp_path / "a" / "checkpoints" / "step_00000003").mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    measured.clear()
    assert chosen(config(tmp_path, "b", checkpoint={"load": str(checkpoint)})) == MKL


def test_what_is_fixed_is_not_measured(measured, tmp_path):
    assert chosen(config(tmp_path, "deterministic", run={"deterministic": True})) == ONEDNN
    assert chosen(config(tmp_path, "mkl", train={"fp32_matmul": "mkl"})) == MKL
    assert chosen(config(tmp_path, "onednn", train={"fp32_matmul": "onednn"})) == ONEDNN
    assert chosen(config(tmp_path, "bf16", train={"precision": "bf16"})) == UNTOUCHED


def test_an_option_that_changes_is_obeyed(measured, tmp_path):
    measured |= {"onednn": 1.0, "mkl": 0.5}
    assert chosen(config(tmp_path)) == MKL
    assert chosen(config(tmp_path, train={"fp32_matmul": "onednn"})) == ONEDNN


def test_products_that_round_must_be_allowed(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(matmul_library, "rounds", lambda: True)
    assert chosen(config(tmp_path, "auto")) == MKL
    with pytest.raises(ConfigError, match=r"train.fp32_matmul = onednn: .* rounds .* Set mkl"):
        chosen(config(tmp_path, "onednn", train={"fp32_matmul": "onednn"}))
    measured |= {"bf16": 1.0, "mkl": 3.0}
    assert chosen(config(tmp_path, "bf16", train={"fp32_matmul": "bf16"})) == ONEDNN


def test_ranks_that_measure_differently_agree(ranks, tmp_path):
    tree = {
        "run": {"dir": str(tmp_path), "name": "a"},
        "model": {"vocab_size": 64},
        "parallel": {"dp": 2},
        "train": {"global_batch_size": 8},
    }
    assert (
        ranks.run(2, jobs_parts.matmul_setting, tree, [{"onednn": 1.0, "mkl": 0.1}, {"onednn": 1.0, "mkl": 2.5}])
        == [ONEDNN] * 2
    )


def test_the_products_of_a_step_are_the_models(tmp_path):
    """FLOPs of a step by hand: 6 per weight of a matrix and token, and per layer, head and row six products of length²
    · width."""
    run_config = config(tmp_path, train={"global_batch_size": 4, "micro_batch_size": 2})
    matmuls = step_products(run_config, Mesh(Layout.of(run_config)))
    weights = 2 * (3 * 16 * 16 + 16 * 16 + 3 * 16 * 24) + 64 * 16
    by_hand = 6 * weights * 4 * 8 + 2 * (6 * 2 * 8 * 8 * 8) * 2 * 4
    assert sum(product.flops * product.times for product in matmuls) == by_hand


def test_a_part_of_a_row_has_its_products(tmp_path):
    """A row of 3 positions on 4 ranks is padded to 8: each rank has 2 positions, which attend to 8."""
    parallel = {"dp": 1, "cp": 4, "context": "ring"}
    run_config = config(tmp_path, train={"global_batch_size": 4, "micro_batch_size": 2}, parallel=parallel)
    run_config.data.sequence_length = 3
    matmuls = step_products(run_config, Mesh(Layout()))  # every cp rank has the same
    weights = 2 * (3 * 16 * 16 + 16 * 16 + 3 * 16 * 24) + 64 * 16
    assert (
        sum(product.flops * product.times for product in matmuls)
        == 6 * weights * 4 * 2 + 2 * (6 * 2 * 2 * 8 * 8) * 2 * 4
    )


@pytest.mark.parametrize("shape", [(5, 7, 3, 0), (3, 4, 6, 2), (40_000, 4096, 128_256, 0)])
def test_measuring_gives_seconds_for_each_library_whatever_the_size(shape):
    rows, inner, columns, batch = shape
    seconds = matmul_library.measure(
        [matmul_library.MatmulShape(rows, inner, columns, (False, True), batch, times=3)], ("onednn", "mkl")
    )
    assert set(seconds) == {"onednn", "mkl"} and min(seconds.values()) >= 0


def test_rounding_is_found_by_its_result():
    factor = torch.full((128, 128), 1 + 2**-12)
    torch.set_float32_matmul_precision("medium")
    assert matmul_library.rounds() == bool((factor @ factor)[0, 0] == 128)
