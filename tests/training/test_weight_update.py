"""A step that ends before the whole pipeline knows its gradient norm gives what waiting gives, bit for bit."""

from __future__ import annotations

import gc
import json
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megalite.config.load import from_dict
from megalite.optimizer.registry import STATE
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import mesh_of
from tests.support.jobs_saving import fit_to_the_end
from tests.support.spaces.layouts import Case

STEPS = 6
MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 4, "masked": True, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "pp 4": {"pp": 4, "layers": 8, "microbatches": 4},
    "tp 2, pp 2, dp 2": {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "microbatches": 2},
    "pp 2, dp 2, ZeRO-3": {"pp": 2, "dp": 2, "zero": 3, "microbatches": 4},
    "pp 2, dp 2, PowerSGD": {"pp": 2, "dp": 2, "zero": 1, "microbatches": 4, "powersgd_rank": 2},
    "pp 2, tied": {"pp": 2, "microbatches": 2, "tied": True},
}


EVENT_STEP = 3
EVENTS = {"nothing": 1.0, "clips": 1e6, "infinite": torch.inf}  # factor on one gradient of the first stage in that step


def train(context: Any, config: dict[str, Any], factor: float) -> dict[str, Any]:
    """Train without waiting where the schedule lets it."""
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    updater = trainer.weight_updater
    finish, finish_step, confirm = trainer.store.reducer.finish, updater.finish, updater.confirm
    log: list[Any] = []

    def finish_and_break() -> None:
        finish()
        if trainer.step_done + 1 == EVENT_STEP and context.rank == 0:
            next(memory for memory in trainer.store.buckets if memory.gradients is not None).owned_grads[:64] *= factor

    def logged_finish(*args: Any) -> None:
        finish_step(*args)
        log.append("ahead" if trainer.weight_updater.pending is not None else "waited")

    def logged_confirm() -> bool:
        log.append(confirm())
        return log[-1]

    trainer.store.reducer.finish = finish_and_break  # type: ignore[method-assign]
    updater.finish, updater.confirm = logged_finish, logged_confirm  # type: ignore[method-assign]
    try:
        known = [trainer.train_step(wait=step == STEPS - 1) for step in range(STEPS)]
        results = [result for step in known for result in step]
        tensors = global_tensors(trainer, STATE)
    finally:
        trainer.close()
    keys = [
        (result.step, result.loss, result.grad_norm, result.skipped, result.lr, result.tokens) for result in results
    ]
    return {
        "results": keys,
        "known": [[result.step for result in step] for step in known],
        "log": log,
        "tensors": tensors,
        "skipped": trainer.weight_updater.skipped,
    }


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


CASES = [
    ("nothing", "zb-v", "pp 4", "fp32"),
    ("clips", "zb-h2", "pp 4", "fp32"),
    ("infinite", "zb-v", "pp 4", "fp32"),
    ("infinite", "zb-v", "tp 2, pp 2, dp 2", "bf16"),
    ("nothing", "zb-h2", "pp 2, tied", "fp32"),
    ("clips", "zb-v", "pp 2, dp 2, ZeRO-3", "bf16"),
    *((event, "zb-v", "pp 2, dp 2, PowerSGD", "fp32") for event in ("clips", "infinite")),
]
"""Each event under both schedules or on several layouts; PowerSGD, whose errors are restored, has both that undo."""


@pytest.mark.parametrize("event, schedule, layout, precision", CASES)
def test_running_ahead_is_waiting(event, schedule, layout, precision, ranks, prefix):
    case = {**MODEL, **LAYOUTS[layout], "schedule": schedule}
    results = {}
    for optimistic in (True, False):
        config = config_of(case, prefix, precision)
        config["parallel"] |= {
            "schedule": schedule,
            "optimistic_step": optimistic,
            "powersgd_rank": case.get("powersgd_rank"),
        }
        config["optimizer"] |= {"lr": 1e-3}
        config["train"]["grad_clip"] = 10.0
        results[optimistic] = ranks.run(case["tp"] * case["pp"] * case["dp"], train, config, EVENTS[event])
    ahead, waited = results[True], results[False]
    assert [step for step, *_ in ahead[0]["results"]] == list(range(1, STEPS + 1))
    assert all(repr(rank["results"]) == repr(waited[0]["results"]) for rank in (*ahead, *waited))  # repr: NaN is itself
    assert all(torch.equal(value, waited[0]["tensors"][name]) for name, value in ahead[0]["tensors"].items())
    assert set(waited[0]["log"]) == {"waited"}
    assert all(rank["known"] == ahead[0]["known"] for rank in ahead), (
        "ranks that stop or save for a result must all do so in one step"
    )
    logs = [rank["log"] for rank in ahead]
    assert all(log == logs[0] for log in logs)
    skipped = [skipped for _, _, _, skipped, *_ in ahead[0]["results"]]
    assert skipped == [event == "infinite" and step == EVENT_STEP for step in range(1, STEPS + 1)]
    assert ahead[0]["skipped"] == sum(skipped)
    if event == "nothing":
        assert logs[0] == ["waited", *["ahead", True] * (STEPS - 2), "waited"]
    else:  # the step after the event waits for its own total, and those after it run ahead again
        assert logs[0] == ["waited", "ahead", True, "ahead", False, "waited", "ahead", True, "waited"]


def test_a_run_ahead_that_has_to_stop_saves_on_all_ranks(ranks, prefix, tmp_path):
    """A signal or the time limit reaches one rank, and the others with the totals of a step."""
    config = config_of({**MODEL, **LAYOUTS["pp 4"], "schedule": "zb-v"}, prefix)
    config["run"] |= {"dir": str(tmp_path), "name": "run"}
    config["train"] |= {"steps": 100_000, "stop_after": "1s", "grad_clip": 0.0}
    done = ranks.run(4, fit_to_the_end, config)
    assert (
        len(set(done)) == 1 and (tmp_path / "run" / "checkpoints" / f"step_{done[0]:08d}" / "manifest.json").is_file()
    )
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, done[0] + 1))


def test_nothing_is_lost_between_runs_ahead_and_a_checkpoint(ranks, prefix):
    """Saving, validating and closing bring a pending step to its end by themselves."""
    case = {**MODEL, **LAYOUTS["pp 4"], "schedule": "zb-v"}
    config = config_of(case, prefix)
    config["parallel"]["schedule"] = "zb-v"
    config["train"]["grad_clip"] = 10.0
    assert all(ranks.run(4, settle_and_go_on, config))


def settle_and_go_on(context: Any, config: dict[str, Any]) -> bool:
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    steps = []
    for _ in range(4):
        steps += [result.step for result in trainer.train_step()]
    pending = trainer.weight_updater.pending is not None
    trainer.weight_updater.drain()
    steps += [result.step for result in trainer.train_step(wait=True)]
    trainer.close()
    return pending and steps == [1, 2, 3, 4, 5]


def test_a_total_reaches_a_slow_rank_although_the_last_one_has_closed_and_gone(ranks, prefix):
    """gloo drops a message whose sender no longer holds it."""
    config = config_of({**MODEL, **LAYOUTS["pp 2, tied"], "schedule": "zb-h2"}, prefix)
    assert len(set(ranks.run(2, close_at_once, config))) == 1


def close_at_once(context: Any, config: dict[str, Any]) -> float:
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    irecv = dist.irecv

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return irecv(*args, **options)

    with patch.object(dist, "irecv", late if context.rank == 0 else irecv):
        loss = trainer.step().loss
    trainer.close()
    del trainer
    gc.collect()
    return loss
