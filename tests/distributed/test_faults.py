"""Faults made on purpose, on real ranks: bad steps are skipped by all, runs go back, stop, and say where they wait."""

from __future__ import annotations

import gc
import json
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.config.load import from_dict
from megalite.launch.exit_status import ExitStatus
from megalite.optimizer.registry import STATE
from megalite.training.bad_steps import FaultLimit
from megalite.training.fit import fit
from megalite.training.hang import explain, load
from megalite.training.verify import global_tensors
from megalite.training.watchdog import Watchdog
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import make_trainer
from tests.support.jobs_training import resume
from tests.support.spaces.layouts import Case

MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 4, "masked": True, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "one process": {"microbatches": 2},
    "dp 2, ZeRO-2": {"dp": 2, "zero": 2},
    "dp 2, PowerSGD": {"dp": 2, "zero": 1, "powersgd_rank": 2},
    "tp 2, pp 2, zb-v": {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "zb-v"},
    "pp 2, zb-v": {"pp": 2, "microbatches": 4, "schedule": "zb-v"},
    "pp 2, dp 2": {"pp": 2, "dp": 2, "microbatches": 2},
}
STEPS = 11


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def configuration(layout: str, prefix: str, directory: Path, **changes: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Number of ranks, and configuration."""
    case = {**MODEL, **LAYOUTS[layout]}
    config = config_of(case, prefix, run={"dir": str(directory), "name": "run"}, **changes)
    config["parallel"]["powersgd_rank"] = case.get("powersgd_rank")
    config["train"] |= {"steps": STEPS, "grad_clip": 10.0, **changes.get("train", {})}
    return case["tp"] * case["pp"] * case["dp"], config


def fitted(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A whole run, as pretrain.py does it: where it ended, or why."""
    trainer = make_trainer(context, config)
    try:
        with Watchdog(trainer.config, trainer.mesh, trainer.run_dir):
            ended = fit(trainer)
        place = {
            "step": trainer.step_done,
            "samples": trainer.samples,
            "skipped": trainer.weight_updater.skipped,
            "ended": ended,
        }
        return {**place, "tensors": global_tensors(trainer, STATE)}
    except FaultLimit as error:
        return {"error": str(error), "step": trainer.step_done}
    finally:
        trainer.close()
        gc.unfreeze()
        gc.enable()


def fitted_in_virtual_time(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The same, where nothing takes time but a fault that makes a step slow."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    with (
        patch("megalite.training.fault_injection.sleep", spend),
        patch("megalite.training.stop_requests.monotonic", lambda: now[0]),
    ):
        return fitted(context, config)


def fitted_until_all_have_said(context: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The same, where a slow step lasts until every rank has said that it stalls."""
    record = Path(config["run"]["dir"], "run", "stalls", "collectives_{:05d}.json")

    def wait(seconds: float) -> None:
        deadline = time.monotonic() + 240
        while (
            not all(Path(str(record).format(rank)).exists() for rank in range(context.world))
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)

    with patch("megalite.training.fault_injection.sleep", wait):
        return fitted(context, config)


def by_hand(context: Any, config: dict[str, Any], steps: list[int | None]) -> dict[str, torch.Tensor]:
    """Train on the global batches of these numbers, one a step; None is a step that changes nothing."""
    trainer = make_trainer(context, config)
    batch = from_dict(config).train.global_batch_size
    for number in steps:
        if number is None:
            trainer.step_done += 1
            trainer.weight_updater.skipped += 1
        else:
            trainer.samples = number * batch
            trainer.step()
    tensors = global_tensors(trainer, STATE)
    trainer.close()
    return tensors


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


BAD = {5: "nan:rank={last},step=5", 8: "spike:rank=0,step=8,factor=50", 10: "spike:rank={last},step=10,factor=nan"}


@pytest.mark.parametrize("layout", ["one process", "dp 2, ZeRO-2", "dp 2, PowerSGD", "tp 2, pp 2, zb-v"])
def test_a_bad_step_is_skipped_by_all_ranks_as_if_it_had_not_been(layout, ranks, prefix, tmp_path):
    faults = {
        "inject": " ".join(BAD.values()).format(last=0 if layout == "one process" else 1),
        "spike_sigma": 20.0,
        "spike_window": 4,
    }
    world, config = configuration(layout, prefix, tmp_path, faults=faults)
    results = ranks.run(world, fitted, config)
    assert all(rank["step"] == STEPS and rank["skipped"] == len(BAD) for rank in results)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if line["skipped"]] == list(BAD)
    assert lines[4]["grad_norm"] is None and lines[4]["loss"] > 0
    assert lines[7]["loss"] > 20 * lines[6]["loss"] and lines[9]["loss"] is None
    expected = ranks.run(
        world, by_hand, config | {"faults": {}}, [None if step + 1 in BAD else step for step in range(STEPS)]
    )[0]
    assert equal(results[0]["tensors"], expected)


def test_a_resumed_run_knows_the_losses_before(ranks, prefix, tmp_path):
    """Two steps after the resume there is a spike, which two losses alone would not show."""
    faults = {"inject": "spike:step=8,factor=50", "spike_sigma": 20.0, "spike_window": 5}
    world, config = configuration(
        "dp 2, ZeRO-2", prefix, tmp_path, faults=faults, checkpoint={"interval": 6, "load": "none"}
    )
    straight = ranks.run(world, fitted, config)[0]
    config["checkpoint"]["load"] = str(tmp_path / "run" / "checkpoints" / "step_00000006")
    resumed = ranks.run(world, resume, config, STEPS - 6)[0]
    assert straight["skipped"] == 1 and resumed["losses"][1] > 100
    assert equal(resumed["tensors"], straight["tensors"])


@pytest.mark.parametrize("layout", ["dp 2, PowerSGD", "pp 2, zb-v"])
def test_a_run_that_stays_bad_goes_back_and_leaves_the_samples_out(layout, ranks, prefix, tmp_path):
    """The checkpoint of step 6 is one of the bad steps: none to return to, and not the only one to be kept."""
    faults = {"inject": "nan:rank=0,step=5 nan:rank=1,step=6 nan:rank=0,step=7", "skip_limit": 3, "rollback": True}
    checkpoint = {"interval": 3, "keep": 1, "load": "none", "async_save": "zb-v" in layout}
    world, config = configuration(layout, prefix, tmp_path, faults=faults, checkpoint=checkpoint)
    results = ranks.run(world, fitted, config)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)) and not any(line["skipped"] for line in lines)
    batch = config["train"]["global_batch_size"]
    assert all((rank["step"], rank["samples"], rank["skipped"]) == (STEPS, (STEPS + 4) * batch, 0) for rank in results)
    expected = ranks.run(world, by_hand, config | {"faults": {}}, [0, 1, 2, *range(7, STEPS + 4)])[0]
    assert equal(results[0]["tensors"], expected)


@pytest.mark.parametrize("layout, limit", [("dp 2, ZeRO-2", 3), ("pp 2, zb-v", 1)])
def test_a_run_that_stays_bad_ends_on_all_ranks_and_publishes_nothing(layout, limit, ranks, prefix, tmp_path):
    """Where ranks run ahead, a limit of one is noticed in the step after it, by all of them."""
    faults = {"inject": [f"nan:rank=1,step=5-{4 + limit}"], "skip_limit": limit}
    changes = {"checkpoint": {"interval": 7, "load": "none"}, "train": {"steps": 7}}
    world, config = configuration(layout, prefix, tmp_path, faults=faults, **changes)
    results = ranks.run(world, fitted, config)
    assert len({rank["error"] for rank in results}) == 1 and {rank["step"] for rank in results} == {
        limit + 4 + (limit == 1)
    }
    batch, bad = config["train"]["global_batch_size"], limit + 4
    said = f"{limit} consecutive steps were skipped, most recently step {bad}: the gradients are not finite"
    assert results[0]["error"].startswith(
        f"{said} (samples {(bad - 1) * batch} to {bad * batch - 1}). Reached faults.skip_limit={limit}"
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


SIGINT_AND_SIGTERM = "sigint:rank=1,step=4 sigterm:rank=0,step=4"


@pytest.fixture(scope="module")
def undisturbed(ranks, prefix, tmp_path_factory) -> dict[str, torch.Tensor]:
    """The state at the end of a run that nothing stops."""
    world, config = configuration("dp 2, ZeRO-2", prefix, tmp_path_factory.mktemp("undisturbed"))
    return ranks.run(world, by_hand, config | {"checkpoint": {"load": "none"}}, list(range(STEPS)))[0]


@pytest.mark.parametrize("fault", [SIGINT_AND_SIGTERM, "sigusr1:rank=0,step=4", "slow:rank=1,step=4,seconds=61"])
def test_one_rank_that_has_to_stop_saves_on_all_and_a_later_start_goes_on(fault, ranks, prefix, tmp_path, undisturbed):
    """A signal, or the time limit, which a slow step exceeds."""
    changes = {
        "checkpoint": {"load": "auto"},
        "train": {"stop_after": "1m" if "slow" in fault else None, "watchdog": None},
    }
    world, config = configuration("dp 2, ZeRO-2", prefix, tmp_path, faults={"inject": fault}, **changes)
    how = ExitStatus.INTERRUPTED if "sigint" in fault else ExitStatus.STOPPED
    assert {(rank["step"], rank["ended"]) for rank in ranks.run(world, fitted_in_virtual_time, config)} == {(4, how)}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000004"]
    config["faults"], config["train"]["stop_after"] = {}, None
    ended = ranks.run(world, fitted, config)[0]
    assert (ended["step"], ended["ended"]) == (STEPS, ExitStatus.DONE) and [
        line["step"] for line in metrics(tmp_path)
    ] == list(range(1, STEPS + 1))
    assert equal(ended["tensors"], undisturbed)


def test_a_stall_is_said_once_by_every_rank_with_the_rank_that_it_waits_for(ranks, prefix, tmp_path):
    """pp 2 × dp 2, rank 3 sleeps: rank 2 waits for its data-parallel neighbour, and ranks 0 and 1 for what 2 and 3
    should send."""
    changes = {"train": {"watchdog": "6s", "steps": 5}, "faults": {"inject": "slow:rank=3,step=3,seconds=1"}}
    world, config = configuration("pp 2, dp 2", prefix, tmp_path, **changes)
    ranks.run(world, fitted_until_all_have_said, config)
    said = [(tmp_path / "run" / "stalls" / f"rank_{rank:05d}.txt").read_text() for rank in range(world)]
    for rank, text in enumerate(said):
        assert (
            len(re.findall(rf"^rank {rank}: no progress for \d+ s in step 3, last action ", text, re.MULTILINE)) == 1
        ), text
    for rank in (0, 1):
        where = rf"last action B0\.0, awaiting pipeline message RB0\.0<1, rank {rank + 2} since"
        assert re.search(where + r" [\d:]{8}; run.timeout ends the run at [\d:]{8}; stacks: ", said[rank]), said[rank]
    assert re.search(r"awaiting all_reduce over data, rank 3 since", said[2]), said[2]
    assert "last action between steps; not waiting for communication" in said[3] and "between_steps" in said[3], said[3]
    assert all("collectives.py" in text for text in said[:3])
    record = json.loads((tmp_path / "run" / "stalls" / "collectives_00000.json").read_text())
    assert record["entries"], "torch's own record of what was under way"
    explanation = explain(load(tmp_path / "run"))
    assert (
        explanation.culprit == 3
        and explanation.instead.startswith("it was in step 3, between steps (")
        and "in between_steps" in explanation.instead
    )
    assert {(wait.rank, wait.on) for wait in explanation.waits} >= {(0, 2), (1, 3), (2, 3)}
    assert len(explanation.chain) == 3
