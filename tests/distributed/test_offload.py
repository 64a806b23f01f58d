"""Optimizer state in CPU memory or in a mapped file, weights in CPU memory: the same run in less memory, or one message
why not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.mesh.mesh import Layout, Mesh
from megalite.optimizer.registry import STATE
from megalite.parallel.sharding import offload
from megalite.parallel.sharding.state_memory import StateRange
from megalite.training import memory_report as accounting
from megalite.training.trainer import Trainer
from tests.support import jobs, jobs_training
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import make_trainer
from tests.support.spaces.layouts import Case

ROOT = Path(__file__).parents[2]
STEPS = 2
MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 5, "masked": True, "dropout": 0.1}
LAYOUTS: dict[str, Case] = {
    "one process": {},
    "dp 2, ZeRO-0": {"dp": 2, "microbatches": 2, "zero": 0},
    **{f"dp 2, ZeRO-{zero}": {"dp": 2, "microbatches": 2, "zero": zero} for zero in (1, 2, 3)},
    "dp 4 in groups of 2, ZeRO-3, tied": {"dp": 4, "microbatches": 2, "zero": 3, "dp_shard": 2, "tied": True},
    "tp 2, pp 2, dp 2": {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "zero": 2,
        "microbatches": 4,
        "sequence_parallel": True,
        "kv_heads": 1,
    },
}
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"offload": "cpu"},
    "disk": {"offload": "disk"},
    "weights": {"offload_parameters": True},
    "disk and weights": {"offload": "disk", "offload_parameters": True},
}
WINDOW = 192  # elements: every range of these small models is cut many times, and not evenly


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def configuration(case: Case, prefix: str, precision: str, **parallel: Any) -> dict[str, Any]:
    config = config_of({**MODEL, **case}, prefix, precision)
    config["parallel"] |= {"dp_shard": case.get("dp_shard"), **parallel}
    config["train"]["grad_clip"] = 0.5  # clipping acts
    return config


def world(case: Case) -> int:
    return case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1)


def in_windows(context: Any, job: Any, *args: Any) -> Any:
    with patch.object(offload, "WINDOW", WINDOW):
        return job(context, *args)


@pytest.fixture(scope="module")
def resident(ranks, prefix):
    """The run with everything in place: computed once for each layout and precision."""
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def run(layout: str, precision: str) -> list[dict[str, Any]]:
        if (layout, precision) not in known:
            config = configuration(LAYOUTS[layout], prefix, precision)
            known[layout, precision] = ranks.run(world(LAYOUTS[layout]), jobs.train, config, STEPS, STATE)
        return known[layout, precision]

    return run


def assert_bitwise(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert all(
        (rank["losses"], rank["grad_norms"]) == (expected[0]["losses"], expected[0]["grad_norms"]) for rank in got
    )
    tensors = expected[0]["tensors"]
    assert got[0]["tensors"].keys() == tensors.keys()
    assert [name for name, value in got[0]["tensors"].items() if not torch.equal(value, tensors[name])] == []


CASES = [
    (layout, place, ("fp32", "bf16")[(number + turn) % 2])
    for number, layout in enumerate(LAYOUTS)
    for turn, place in enumerate(PLACES)
    if ("weights" not in place or LAYOUTS[layout].get("zero") == 3) and (layout, place) != ("tp 2, pp 2, dp 2", "cpu")
]
"""In turn in fp32 and in bf16, so that each place and each stage of ZeRO has both."""


@pytest.mark.parametrize("layout, place, precision", CASES)
def test_offloading_changes_no_bit(layout, place, precision, ranks, prefix, resident):
    config = configuration(LAYOUTS[layout], prefix, precision, **PLACES[place])
    got = ranks.run(world(LAYOUTS[layout]), in_windows, jobs.train, config, STEPS, STATE)
    assert_bitwise(got, resident(layout, precision))


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("precision, grad_dtype", [("bf16", "bf16"), ("fp16", "fp32")])
def test_narrow_gradients_and_loss_scales_are_widened_and_divided_alike(precision, grad_dtype, place, ranks, prefix):
    results = []
    for options in ({}, PLACES[place]):
        config = configuration({"dp": 2, "microbatches": 2, "zero": 2}, prefix, precision, **options)
        config["train"]["grad_dtype"] = grad_dtype
        results.append(ranks.run(2, in_windows, jobs.train, config, STEPS, STATE))
    assert_bitwise(results[1], results[0])


def test_one_rank_frees_its_weights_after_use(ranks, prefix, resident):
    """ZeRO-3 with weights in CPU memory shares nothing here, and still keeps no more than two units of the model
    whole."""
    config = configuration({}, prefix, "bf16", zero=3, bucket_mb=1e-6, **PLACES["disk and weights"])
    got = ranks.run(1, in_windows, jobs.train, config, STEPS, STATE)
    assert_bitwise(got, resident("one process", "bf16"))
    assert ranks.run(1, most_whole_buckets, config) == [2]


def most_whole_buckets(context: Any, config: dict[str, Any]) -> int:
    trainer = make_trainer(context, config)
    gatherer, most = trainer.store.gatherer, 0
    assert gatherer is not None
    acquire = gatherer.acquire

    def counted(unit: int) -> None:
        nonlocal most
        acquire(unit)
        most = max(most, sum(bucket.resident for bucket in trainer.store.buckets))

    gatherer.acquire = counted  # type: ignore[method-assign]
    trainer.step()
    trainer.close()
    return most


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
def test_a_schedule_that_runs_ahead_waits_instead_of_copying_state(schedule, ranks, prefix):
    case: Case = {"pp": 2, "microbatches": 4, "schedule": schedule}
    expected, got = (
        ranks.run(2, steps_ahead, configuration(case, prefix, "bf16", offload=place)) for place in ("none", "disk")
    )
    assert [losses for losses, _ in got] == [losses for losses, _ in expected]
    assert all(ahead > 0 for _, ahead in expected) and all(ahead == 0 for _, ahead in got)


def steps_ahead(context: Any, config: dict[str, Any]) -> tuple[list[float], int]:
    """The losses, and after how many steps a total was still on its way."""
    config["train"]["grad_clip"] = 10.0  # nothing clips, so that ranks may run ahead
    trainer, results, ahead = make_trainer(context, config), [], 0
    for step in range(5):
        results += trainer.train_step(wait=step == 4)
        ahead += trainer.weight_updater.pending is not None
    trainer.close()
    return [result.loss for result in results], ahead


@pytest.mark.parametrize(
    "saved, resumed, precision", [("disk", "none", "fp32"), ("none", "disk", "bf16"), ("cpu", "disk", "fp32")]
)
def test_a_checkpoint_resumes_with_state_in_another_place(saved, resumed, precision, ranks, prefix, tmp_path):
    case: Case = {"dp": 2, "microbatches": 2, "zero": 2}
    config = configuration(case, prefix, precision, offload=saved)
    config["run"] = {"dir": str(tmp_path), "name": "saved"}
    expected = ranks.run(2, jobs_training.train_and_save, config, 2, 2)[0]
    config["parallel"]["offload"], config["checkpoint"]["load"] = resumed, expected["directory"]
    for got in ranks.run(2, jobs_training.resume, config, 2):
        assert got["losses"] == expected["losses"][2:]
        assert all(torch.equal(value, expected["tensors"][name]) for name, value in got["tensors"].items())


# ---- memory


def states(
    context: Any, config: dict[str, Any]
) -> tuple[accounting.ModelStates, accounting.ModelStates, dict[str, int], list[str]]:
    trainer = make_trainer(context, config)
    sizes = (
        accounting.measured(trainer),
        accounting.formula(trainer),
        accounting.places(trainer),
        accounting.report(trainer),
    )
    trainer.close()
    return sizes


@pytest.mark.parametrize("precision, on_disk", [("fp32", 8), ("bf16", 12)])
@pytest.mark.parametrize("zero", [1, 3])
def test_the_report_says_what_is_where(zero, precision, on_disk, ranks, prefix):
    """In fp32 a master on the CPU is the weight itself, and stays."""
    config = configuration({"dp": 2, "zero": zero}, prefix, precision, offload="disk")
    config["model"] |= {"hidden_size": 128, "intermediate_size": 384}
    for sizes, expected, places, report in ranks.run(2, states, config):
        parameters = expected.optimizer / (on_disk / 2)
        assert sizes == expected
        assert places["disk"] == pytest.approx(on_disk * parameters / 2, rel=0.03)
        assert places["cpu"] == pytest.approx(sizes.weights + sizes.gradients)
        assert f"{places['disk'] / 1e6:,.1f} MB on disk" in report[0]


LIMITED = """
import re, resource, sys
from pathlib import Path
from megalite.commands import train
import megalite.checkpoint.tensors, megalite.training.fit, megalite.training.memory_report
from megalite.training.trainer import Trainer

def mebibytes(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

def save(trainer, *options):
    print(f"resident while training: {mebibytes('VmHWM') - before}", flush=True)
    return unlimited(trainer, *options)

unlimited, Trainer.begin_save = Trainer.begin_save, save
before = mebibytes("VmRSS")
limit = mebibytes("VmData") + int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, limit << 20))
train.main()
"""
LARGE = {
    **{"model.hidden_size": 512, "model.intermediate_size": 2048, "model.num_hidden_layers": 4},
    **{
        "data.sequence_length": 16,
        "train.steps": 3,
        "train.global_batch_size": 2,
        "train.micro_batch_size": 2,
        "train.precision": "bf16",
    },
}
BUDGET_MIB = 180  # beyond what the libraries take; masters and moments alone are 193, all the rest about 140


def pretrain(options: dict[str, Any], *before: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    values = [part for option, value in options.items() for part in (f"--{option}", str(value))]
    return subprocess.run(
        [sys.executable, *before, *values], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures through /proc")
def test_trains_and_saves_in_memory_that_its_state_does_not_fit(tmp_path, prefix):
    """RLIMIT_DATA bounds all that a process allocates; pages of a shared file mapping are no part of that."""
    done = {}
    for place in ("none", "disk"):
        options = {**LARGE, "run.dir": tmp_path, "run.name": place, "data.train": prefix, "parallel.offload": place}
        done[place] = pretrain(options, "-c", LIMITED, str(BUDGET_MIB))
    assert done["none"].returncode != 0 and "can't allocate memory" in done["none"].stderr, done["none"].stderr[-2000:]
    assert done["disk"].returncode == 0, done["disk"].stderr[-2000:]
    resident_mib = int(done["disk"].stdout.split("resident while training: ")[1].split()[0])
    assert resident_mib < BUDGET_MIB
    assert (tmp_path / "disk" / "checkpoints" / "latest").exists()
    assert list((tmp_path / "disk" / "offload").iterdir()) == [], "the file has no name, so nothing is left"


# ---- what can go wrong


@pytest.mark.parametrize(
    "options, says",
    [
        (
            {"parallel.offload_dir": "FILE/inside"},
            ("parallel.offload_dir=", "FILE/inside: Not a directory.", "cpu"),
        ),
        (
            {"model.hidden_size": 65536, "model.num_attention_heads": 512, "model.num_hidden_layers": 100},
            (
                "parallel.offload_dir=",
                "run/offload: it requires ",
                "bytes, but ",
                "are free (No space left on device)",
                "cpu",
            ),
        ),
    ],
)
def test_a_disk_that_can_not_serve_is_one_message_before_anything_starts(options, says, tmp_path, prefix):
    (tmp_path / "FILE").touch()
    options = {option: str(value).replace("FILE", str(tmp_path / "FILE")) for option, value in options.items()}
    run = {"run.dir": tmp_path, "run.name": "run", "data.train": prefix, "data.sequence_length": 16}
    done = pretrain({**run, **options, "parallel.offload": "disk"}, "pretrain.py")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and all(
        part.replace("FILE", str(tmp_path / "FILE")) in done.stderr for part in says
    ), done.stderr


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refusal_where_one_disk_is_full(context: Any, config: dict[str, Any]) -> str:
    with largest_file(4096 if context.rank == 1 else resource.RLIM_INFINITY):
        return jobs_training.refusal(context, config)


def test_every_rank_says_that_the_disk_of_one_is_full(ranks, prefix):
    config = configuration({"dp": 2, "zero": 1}, prefix, "bf16", offload="disk")
    message, other = ranks.run(2, refusal_where_one_disk_is_full, config)
    assert message == other and "Not enough space for the optimizer state" in message and "(File too large)" in message


def test_a_file_that_is_damaged_while_training_ends_the_run_and_reaches_no_checkpoint(prefix, tmp_path):
    config = configuration({}, prefix, "bf16", offload="disk")
    config["run"] = {"dir": str(tmp_path), "name": "damaged"}
    trainer = Trainer(from_dict(config), Mesh(Layout()))
    trainer.step()
    saved = trainer.save()
    state = trainer.store.state
    assert isinstance(state, offload.DiskState)
    os.ftruncate(state.file.fileno(), 0)  # what a disk that fails does to the pages
    with pytest.raises(
        offload.OffloadError, match=r"parallel\.offload_dir=.* is corrupted: its pages could not be read"
    ):
        trainer.step()
    with (
        patch("os.fsync", side_effect=OSError(5, "Input/output error")),
        pytest.raises(offload.OffloadError, match="Input/output error"),
    ):
        trainer.save()
    trainer.loader.close()
    assert [path.name for path in saved.parent.iterdir() if path.is_dir()] == [saved.name]


def test_a_directory_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"parallel\.offload_dir=.*: Not a directory"):
        offload.DiskState(tmp_path / "file" / "inside")


def resident_file_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile", "RssShmem")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures through /proc")
def test_a_walk_over_a_large_file_has_one_window_in_memory(tmp_path):
    state, count = offload.DiskState(tmp_path), 8 * offload.WINDOW
    # what these operations need of torch's libraries is resident then
    state.zeros(offload.WINDOW, torch.float32).add_(1).eq(1).all()
    state.release()
    master, exp_avg, exp_avg_sq = (state.zeros(count, torch.float32) for _ in range(3))
    weights, grads = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count)
    before, most = resident_file_bytes(), 0
    for _ in range(2):
        for window in state.windows([StateRange(True, 1.0, weights, grads, master, (exp_avg, exp_avg_sq))]):
            for tensor in (window[0].master, *window[0].state):
                tensor += 1
            most = max(most, resident_file_bytes() - before)
    assert 10 * offload.WINDOW < most < 14 * offload.WINDOW, "12 bytes for each element of one window, of eight"
    assert (master == 2).all() and (exp_avg_sq == 2).all()
    assert resident_file_bytes() - before > 60 * offload.WINDOW
    state.release()
    assert resident_file_bytes() - before < 2 * offload.WINDOW
    assert (exp_avg == 2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloading_from_a_gpu_trains_alike(precision, place, prefix):
    losses = []
    for options in ({}, {"zero": 3, **PLACES[place]}):
        trainer = Trainer(from_dict(configuration({}, prefix, precision, **options)), Mesh(Layout()), "cuda:0")
        with patch.object(offload, "WINDOW", WINDOW):
            losses.append([trainer.step().loss for _ in range(2 * STEPS)])
        trainer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6 if precision == "fp32" else 1e-3)
