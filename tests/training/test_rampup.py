"""A run with a ramp-up of the batch size is the run that changes its batch size by hand, on the same sequence of
samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.assembly import parts as build
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.rules import check
from megalite.monitoring.epochs import Epochs
from megalite.training.fit import measured
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support import jobs
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 2, "masked": False, "dropout": 0.1}
RAMP = [4, 4, 16]  # to 12: 4, 4 | 8 | 12 …
SIZES = [4, 4, 8, 12, 12]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def options(prefix: str, directory: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    config = config_of(CASE, prefix, run={"dir": str(directory), "name": "run"})
    config["train"] |= {"steps": len(SIZES), "global_batch_size": 12, "micro_batch_size": 2, "rampup_batch_size": RAMP}
    config["optimizer"] |= {"decay": "constant", "warmup_steps": 0}
    config["checkpoint"] = {}
    return {section: {**config.get(section, {}), **changes.get(section, {})} for section in {**config, **changes}}


def trainer(config: dict[str, Any]) -> Trainer:
    run_config = from_dict(config)
    return Trainer(run_config, build.make_mesh(run_config))


def by_hand(prefix: str, directory: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Every step by a run of its batch size, which resumes the one before."""
    losses = []
    for size in SIZES:
        started = trainer(options(prefix, directory, train={"global_batch_size": size, "rampup_batch_size": None}))
        losses.append(started.step().loss)
        started.save()
        tensors = global_tensors(started)
        started.close()
    return losses, tensors


@pytest.mark.parametrize("stop", [None, 1, 3])
def test_it_is_the_run_that_changes_its_batch_size_by_hand(stop, prefix, tmp_path):
    expected, tensors = by_hand(prefix, tmp_path / "by hand")
    started, losses, numbers = trainer(options(prefix, tmp_path / "ramp")), [], []
    for step in range(1, len(SIZES) + 1):
        result = started.step()
        losses.append(result.loss)
        numbers.append((Epochs(started).numbers(measured(started, result)), result.tokens))
        if step == stop:
            started.save()
            started.close()
            started = trainer(options(prefix, tmp_path / "ramp"))
            assert (started.step_done, started.samples) == (step, sum(SIZES[:step]))
    assert losses == expected
    assert all(torch.equal(value, tensors[name]) for name, value in global_tensors(started).items())
    assert [each["global_batch_size"] for each, _ in numbers] == SIZES and [count for _, count in numbers] == [
        16 * size for size in SIZES
    ]
    assert [each["tokens_seen"] for each, _ in numbers] == [16 * sum(SIZES[: step + 1]) for step in range(len(SIZES))]
    started.close()


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "ahead": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2},
}


@pytest.fixture(scope="module")
def one_process(ranks, prefix, tmp_path_factory) -> dict[str, Any]:
    return ranks.run(1, jobs.train, options(prefix, tmp_path_factory.mktemp("one"), **FP64), len(SIZES))[0]


FP64: dict[str, Any] = {
    "train": {"precision": "fp64"},
    "optimizer": {"decay": "cosine", "warmup_steps": 1},
    "model": {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_train_the_same(layout, ranks, prefix, one_process, tmp_path):
    config = options(prefix, tmp_path, **FP64)
    config["parallel"] |= LAYOUTS[layout]
    results = ranks.run(2, jobs.train, config, len(SIZES))[0]
    assert results["losses"] == pytest.approx(one_process["losses"], rel=1e-9)


REFUSED = {
    "three numbers": (
        {"train": {"rampup_batch_size": [4, 4]}},
        r"train\.rampup_batch_size = \[4, 4\] is not three positive numbers",
    ),
    "above": ({"train": {"rampup_batch_size": [16, 4, 9]}}, r"\[16, 4, 9\] starts above train\.global_batch_size = 12"),
    "increments": (
        {"train": {"rampup_batch_size": [4, 6, 9]}},
        r"does not reach train\.global_batch_size = 12 in whole increments",
    ),
    "microbatches": (
        {"train": {"rampup_batch_size": [3, 3, 9]}},
        r"not multiples of train\.micro_batch_size \* parallel\.dp = 2",
    ),
    "rollbacks": (
        {"faults": {"rollback": True}},
        r"is not supported with faults\.rollback = true.* Remove it, or set faults\.rollback to",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_message(case, prefix, tmp_path):
    changes, message = REFUSED[case]
    config = options(prefix, tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        check(from_dict(config), 1)


def test_another_ramp_on_resume_is_refused(prefix, tmp_path):
    started = trainer(options(prefix, tmp_path))
    started.step()
    started.save()
    started.close()
    with pytest.raises(
        ConfigError, match=r"train\.rampup_batch_size=null does not match .* \(\[4, 4, 16\]\).*allow=\[horizon\]"
    ):
        trainer(options(prefix, tmp_path, train={"rampup_batch_size": None}))
