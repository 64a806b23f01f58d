"""Saving beside training: in the background, on a disk that is full, and killed in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import checkpoint
from megalite.checkpoint.saver import Saver
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import Rectangle
from tests.support import jobs_saving, jobs_training
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.faults import killed_ranks
from tests.support.spaces.layouts import Case

MODEL: Case = {**SINGLE, "tied": True, "kv_heads": 2, "vocab_size": 96, "layers": 4, "masked": False, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "tp2-dp2-zero3": {"tp": 2, "dp": 2, "zero": 3, "microbatches": 2},
    "pp2-dp2-zb-v": {"pp": 2, "dp": 2, "zero": 1, "microbatches": 4, "schedule": "zb-v"},
}

TWO_RANKS: Case = {"dp": 2, "zero": 1, "microbatches": 2}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configuration(layout: Case, prefix: str, directory: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    config = config_of({**MODEL, **layout}, prefix, run={"dir": str(directory), "name": "run"})
    return {section: {**values, **changes.get(section, {})} for section, values in config.items()}


def world(layout: Case) -> int:
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_in_the_background_is_the_one_in_the_foreground(layout, ranks, prefix, tmp_path):
    """File for file the same bytes, although training goes on meanwhile; one is under way at a time."""
    case = LAYOUTS[layout]
    alone = configuration(case, prefix, tmp_path / "alone")
    directories = ranks.run(world(case), jobs_training.train_and_save_each, alone, (3, 5))[0]
    beside = configuration(case, prefix, tmp_path / "beside", checkpoint={"load": "none", "async_save": True})
    for result in ranks.run(world(case), jobs_saving.save_while_training, beside, 3, 2):
        assert result["under_way"] and result["ended"] == ["step_00000003", "step_00000005"]
        first, second = result["first"], result["second"]
        assert first["error"] is None is second["error"]
        assert first["held"] < first["durable"], "training went on before the disk had taken anything"
        assert second["started"] + second["held"] >= first["started"] + first["durable"], (
            "the second one has waited for the first"
        )
    for directory in map(Path, directories):
        saved = tmp_path / "beside" / "run" / "checkpoints" / directory.name
        assert jobs_saving.content_of(saved) == jobs_saving.content_of(directory)


def test_what_changes_after_the_copy_is_not_saved(tmp_path):
    """The same memory is used by the next save, which must not begin before this one has been written."""
    saver = Saver(Mesh(Layout()), CheckpointConfig(async_save=True))
    values = torch.zeros(1000)
    with jobs_saving.slow_disk():
        for step in (1, 2, 3):
            values.fill_(step)
            saver.begin(tmp_path / checkpoint.step_name(step), [Rectangle("w", (1000,), (0,), values)], {})
            values.fill_(-1)
    saver.wait()
    for step in (1, 2, 3):
        loaded = torch.zeros(1000)
        checkpoint.load(tmp_path / checkpoint.step_name(step), [Rectangle("w", (1000,), (0,), loaded)])
        assert loaded.eq(step).all()


@pytest.mark.parametrize(
    "layout, background, timed",
    [(TWO_RANKS, False, [4, 8, 12]), (TWO_RANKS, True, [4, 8, 12]), (LAYOUTS["pp2-dp2-zb-v"], False, [5, 10])],
    ids=["waiting steps", "in the background", "optimistic steps"],
)
def test_by_time_all_ranks_save_after_the_same_step(layout, background, timed, ranks, prefix, tmp_path):
    """A step takes an hour on rank 0's clock, and a save is due after 2.5. An optimistic step is known with the next
    one."""
    options = {"minutes": 150.0, "async_save": background}
    config = configuration(layout, prefix, tmp_path, checkpoint=options, train={"steps": 14, "grad_clip": 1e6})
    expected = [(checkpoint.step_name(step), True) for step in timed] + [(checkpoint.step_name(14), False)]
    assert ranks.run(world(layout), jobs_saving.fit_by_a_clock_of_its_own, config) == [expected] * world(layout)
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*step*"))
    assert left == [name for name, _ in expected[-3:]], "the newest two by time, and the last one"
    assert checkpoint.manifest_of(tmp_path / "run" / "checkpoints" / left[0]).state["timed"] is True


@pytest.mark.parametrize(
    "options, saved", [({"interval": 10}, [10, 14]), ({"minutes": None}, [14])], ids=["an interval", "off"]
)
def test_with_an_interval_or_without_minutes_nothing_is_saved_by_time(options, saved, ranks, prefix, tmp_path):
    config = configuration(TWO_RANKS, prefix, tmp_path, checkpoint=options, train={"steps": 14})
    expected = [(checkpoint.step_name(step), False) for step in saved]
    assert ranks.run(2, jobs_saving.fit_by_a_clock_of_its_own, config) == [expected] * 2


@pytest.fixture(scope="module")
def undisturbed(ranks, prefix, tmp_path_factory) -> Path:
    """checkpoints/ of a run of six steps that saves every second one."""
    config = configuration(
        TWO_RANKS, prefix, tmp_path_factory.mktemp("well"), checkpoint={"interval": 2}, train={"steps": 6}
    )
    ranks.run(2, jobs_saving.fit_to_the_end, config)
    return Path(config["run"]["dir"], "run", "checkpoints")


@pytest.mark.parametrize(("full", "background"), [(0, False), (1, True)], ids=["at once", "in the background"])
def test_training_goes_on_when_the_disk_is_full(full, background, ranks, prefix, undisturbed, tmp_path):
    """The kernel refuses what one rank writes after step 4. What it had written goes at once, step 6 is saved, nothing
    else differs."""
    saves = {"interval": 2, "async_save": background}
    config = configuration(TWO_RANKS, prefix, tmp_path, checkpoint=saves, train={"steps": 6})
    assert ranks.run(2, jobs_saving.fit_with_full_disk, config, full, 4, 4) == [(6, "", False)] * 2
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000002", "step_00000006"]
    assert (checkpoints / "latest").read_text() == "step_00000006\n"
    content, expected = (jobs_saving.content_of(folder / "step_00000006") for folder in (checkpoints, undisturbed))
    assert content == expected


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_run_whose_last_save_fails_does_not_end_well(background, ranks, prefix, tmp_path):
    saves = {"interval": 2, "async_save": background}
    config = configuration(TWO_RANKS, prefix, tmp_path, checkpoint=saves, train={"steps": 4})
    for step, problem, left in ranks.run(2, jobs_saving.fit_with_full_disk, config, 1, 3, 4):
        assert step == 4 and "failed to save" in problem and "File too large" in problem and not left
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", "step_00000002"]


@pytest.mark.parametrize(("layout", "background", "copies"), [("dp2-zero1", False, True), ("pp2", True, False)])
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_weights(
    layout, background, copies, ranks, prefix, tmp_path
):
    """With copies in memory after each step, too, many of which are torn."""
    killed_ranks.Kills(layout, prefix, tmp_path, ranks, background=background, copies=copies).prove(3, seed=7)


def test_a_rank_awaits_a_slow_writer_in_no_collective_that_times_out(ranks, prefix, tmp_path):
    """On a GPU torch ends a process whose collective takes `run.timeout`, and so does gloo's."""
    config = config_of(MODEL | {"dp": 2, "zero": 1}, prefix, run={"dir": str(tmp_path), "name": "run"})
    started, ended = ranks.run(2, jobs_saving.await_a_slow_writer, config, tmp_path / "go on")[0]
    assert (started, ended) == (0, False)
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is not None
