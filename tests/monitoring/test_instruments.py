"""The instruments of a run, on known times and facts: phases, comparisons, ladders, predictions and the lines made of
them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.config.sections.network import NetworkConfig
from megalite.launch.environment import across_hosts, facts, odd_ranks, set_variables, short_of_memory
from megalite.monitoring import gpu, links, tracing
from megalite.monitoring import out_of_memory as memory
from megalite.monitoring.phases import PhaseTimes
from megalite.monitoring.prediction import describe, predicted_bubble, stage_costs
from megalite.monitoring.rank_times import ContextImbalance, compare, context_imbalance
from megalite.parallel.pipeline.schedule import Action, ActionKind
from megalite.planner.hardware.devices import find_device
from megalite.system.activity import BETWEEN, READING, REDUCING, REPORTING, UPDATING, Activity
from megalite.system.clock import HostClock
from tests.monitoring.test_metrics import example

F, B, W = (Action(kind, 0, 0) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT))
SEND = Action(ActionKind.SEND_FORWARD, 0, 0, 1)


class SetClock(HostClock):
    """A clock that is set by hand. What is marked at `lags_from` or later has not been passed yet, as on a device that
    is behind."""

    now, lags_from = 0.0, float("inf")

    def mark(self) -> float:
        return self.now

    def has_passed(self, mark: float) -> bool:
        return mark < self.lags_from


def watched(device: str = "cpu") -> tuple[PhaseTimes, Activity, SetClock]:
    activity, clock = Activity(), SetClock()
    config = Config()
    trainer: Any = SimpleNamespace(device=torch.device(device), mesh=SimpleNamespace(activity=activity), config=config)
    return PhaseTimes(trainer, clock), activity, clock


def step(phases: PhaseTimes, activity: Activity, clock: SetClock, number: int, start: float) -> None:
    """Reads for 1, forward 2 of which 0.5 wait for tp, waits 3 for a stage, backward 4, sends 0.25, reduces 0.5 + 0.5,
    updates 5."""
    clock.now = start
    activity.enter(BETWEEN)
    phases.before(number)
    for seconds, tell in (
        (2.0, lambda: activity.enter(READING)),
        (1.0, lambda: activity.enter(F)),
        (0.5, lambda: activity.wait_for("all_reduce over tp", None)),
        (0.5, activity.arrived),
        (1.0, lambda: activity.enter(SEND)),
        (0.25, lambda: activity.enter(B)),
        (0.0, lambda: activity.wait_for("pipeline message RB0.0<1", 1)),
        (3.0, activity.arrived),
        (3.0, lambda: activity.enter(W)),
        (1.0, lambda: activity.enter(REDUCING)),
        (0.5, lambda: activity.wait_for("all_reduce over data", None)),
        (0.5, activity.arrived),
        (0.0, lambda: activity.enter(UPDATING)),
    ):
        clock.now += seconds
        tell()
    clock.now += 5.0
    activity.enter(REPORTING)
    clock.now += 7.0  # of another instrument
    phases.after(number)


def times(phases: PhaseTimes, number: int) -> dict[str, float]:
    result = phases.numbers(SimpleNamespace(step=number))  # type: ignore[arg-type]
    return {name.removeprefix("time_").removesuffix("_s"): seconds for name, seconds in result.items()}


STEP = {"data": 1.0, "forward": 1.5, "backward": 4.0, "pipeline": 3.0, "communication": 1.75, "optimizer": 5.0}


def test_phases_add_up_to_the_step_and_nothing_between_steps_counts() -> None:
    phases, activity, clock = watched()
    for number, start in ((1, 0.0), (2, 100.0)):
        step(phases, activity, clock, number, start)
        activity.enter(F)  # a validation
        assert phases.working(number) == 1.0 + 1.5 + 4.0 + 5.0
        assert times(phases, number) == STEP and sum(STEP.values()) == 16.25
    assert times(phases, 3) == {} and activity.listeners == ()


def test_on_a_device_that_lags_an_update_counts_in_the_next_step() -> None:
    phases, activity, clock = watched("cuda")
    clock.lags_from = 14.0  # within the update, which begins at 13.25
    step(phases, activity, clock, 1, 0.0)
    clock.lags_from = 114.0
    step(phases, activity, clock, 2, 100.0)
    assert times(phases, 1) == STEP | {"optimizer": 0.0}
    assert times(phases, 2) == STEP


def test_the_slowest_and_the_fastest_rank_are_named() -> None:
    row = compare(7, [1.0, 3.0, 0.5, 2.0])
    assert row == {
        **{
            "ranks_of_step": 7,
            "slowest_rank": 1,
            "slowest_rank_working_s": 3.0,
            "fastest_rank": 2,
            "fastest_rank_working_s": 0.5,
        }
    }


def test_ranks_of_a_context_are_compared_with_each_other() -> None:
    assert context_imbalance([1.0, 3.0, 2.0, 9.0], (1, 2)) == {"context_imbalance_measured": 3.0 / 2.5}
    assert context_imbalance([1.0, 3.0], (1,)) == {}


def test_a_step_has_the_imbalance_that_its_documents_predict() -> None:
    tiles = [np.array([[4, 0], [4, 0]]), np.array([[1, 0], [0, 3]])]
    batches = [[SimpleNamespace(part=SimpleNamespace(tiles=each)) for each in tiles], [SimpleNamespace(part=None)]]
    for method, expected in (("gather", (4 + 3) * 2 / 12), ("ring", (8 + 3) * 2 / 12)):
        config = from_dict({"parallel": {"context": method}})
        trainer: Any = SimpleNamespace(
            config=config, mesh=SimpleNamespace(rank=0), loader=SimpleNamespace(current=batches[0])
        )
        observer = ContextImbalance(trainer)
        observer.after(1)
        trainer.loader.current = batches[1]  # no documents
        observer.after(2)
        assert observer.numbers(example(2)) == {}, "results may be a step late"
        assert observer.numbers(example(1)) == {"context_imbalance_predicted": expected}


def test_ranks_with_other_software_or_hardware_are_named() -> None:
    usual = {"torch": "2.13.0", "device": "NVIDIA H100"}
    results = [dict(usual) for _ in range(16)]
    assert odd_ranks(results, ("torch", "device")) == []
    results[3]["torch"], results[5]["device"] = "2.12.1", "NVIDIA H200"
    for rank in range(6, 16):
        results[rank]["device"] = "NVIDIA H200"
    said = odd_ranks(results, ("torch", "device"))
    assert said[0] == "torch: 2.13.0 on 15 of 16 ranks, but 2.12.1 on rank 3"
    assert said[1] == "device: NVIDIA H200 on 11 of 16 ranks, but NVIDIA H100 on ranks 0, 1, 2, 3, 4"
    own = facts(torch.device("cpu"), 1)
    assert own["torch"] == torch.__version__ and own == facts(torch.device("cpu"), 1)


def test_a_tp_group_on_several_hosts_is_named() -> None:
    results = [{"host": f"node{rank // 6}"} for rank in range(12)]
    assert across_hosts(results, 1) == across_hosts(results, 2) == across_hosts(results, 6) == []
    (line,) = across_hosts(results, 4)
    assert line.startswith("parallel.tp=4: 1 of 3 tp groups span several hosts (first: ranks 4 to 7), so every layer")


def test_a_small_shared_memory_is_named_once_a_host() -> None:
    host = {"host": "node1", "shared_memory": 64 << 20, "wanted_shared_memory": 512 << 20}
    enough = {"host": "node2", "shared_memory": 512 << 20, "wanted_shared_memory": 512 << 20}
    unknown = {"host": "node3", "shared_memory": None, "wanted_shared_memory": 1}
    (line,) = short_of_memory([host, host, enough, unknown])
    assert line.startswith("node1: /dev/shm has 64 MiB free, but its ranks may need 512 MiB")


def test_options_of_the_network_reach_the_environment_unless_it_has_its_own() -> None:
    environment = {"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "23"}
    network = NetworkConfig(interface="eth0", debug="INFO", ib_timeout=23, variables={"NCCL_NVLS_ENABLE": 0})
    notes = set_variables(network, environment)
    own = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_NVLS_ENABLE": "0"}
    own |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environment == {"NCCL_DEBUG": "WARN", "NCCL_IB_TIMEOUT": "23", **own}
    assert notes == ["NCCL_DEBUG = WARN in the environment overrides INFO of the network section"]


def test_values_that_may_be_secret_are_not_printed() -> None:
    (note,) = set_variables(NetworkConfig(variables={"HF_TOKEN": "mine"}), {"HF_TOKEN": "yours"})
    assert note == "HF_TOKEN in the environment overrides the value in the network section"


def test_the_slowest_link_is_named() -> None:
    said = links.describe([links.LinkTraffic(0, 1, 4e9), links.LinkTraffic(1, 2, 5e8), links.LinkTraffic(2, 0, 3e9)])
    assert said == "network test: the slowest of 3 links is from rank 1 to rank 2 with 0.5 GB/s; the median is 3 GB/s"


# ---- out of memory


def run(**options: Any) -> Config:
    """A configuration that its rules accept; parallel__tp is parallel.tp."""
    config = Config()
    config.data.train, config.model.vocab_size, config.parallel.dp = "tokens", 64, 1
    return memory.changed(config, {name.replace("__", "."): value for name, value in options.items()})


def test_the_ladder_has_what_this_run_can_still_change() -> None:
    full = run(parallel__tp=2, parallel__dp=4, train__micro_batch_size=4)
    assert [list(changes.items()) for changes in memory.candidates(full)] == [
        [("train.micro_batch_size", 2)],
        [("train.micro_batch_size", 1)],
        [("train.recompute", "selective")],
        [("train.recompute", "full")],
        [("parallel.sequence_parallel", True)],
        [("parallel.zero", 2)],
        [("parallel.zero", 3)],
        [("parallel.tp", 4), ("parallel.dp", 2)],
        [("parallel.pp", 2), ("parallel.dp", 2)],
        [("parallel.offload", "cpu")],
        [("parallel.offload", "disk")],
    ]
    last = run(train__micro_batch_size=1, train__recompute="full", parallel__zero=3, parallel__offload="disk")
    assert list(memory.candidates(last)) == []


def test_the_ladder_leaves_out_what_the_rules_refuse_and_what_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokens.bin", "tokens.idx"):
        Path(name).touch()
    config = run(parallel__dp=4, parallel__powersgd_rank=2, train__micro_batch_size=2, checkpoint__async_save=True)
    sizes = {"none": 100, "selective": 90, "full": 100}
    rungs = memory.ladder(config, 4, 0, lambda other: sizes[other.train.recompute])
    assert [(rung.changes, rung.saved) for rung in rungs] == [({"train.recompute": "selective"}, 10)]
    every = [
        next(iter(rung.changes.items())) for rung in memory.ladder(config, 4, 0, lambda other: int(other == config))
    ]
    # by PowerSGD, and by saves in the background
    refused = {("parallel.zero", 2), ("parallel.zero", 3), ("parallel.offload", "disk")}
    assert set(every) == {next(iter(changes.items())) for changes in memory.candidates(config)} - refused


def test_the_message_names_place_reason_and_rungs() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")
    said = memory.describe(
        "rank 3 in step 7, F0.1", error, [memory.MemorySaving({"parallel.tp": 4, "parallel.dp": 2}, 3 << 29)]
    ).splitlines()
    assert said[0] == "rank 3 in step 7, F0.1: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert said[-1].split() == ["--parallel.tp", "4", "--parallel.dp", "2", "saves", "1.5", "GiB"]
    assert "Use more GPUs" in memory.describe("rank 0", error, [])


# ---- prediction


def test_the_predicted_bubble_is_that_of_the_schedule_and_its_stages() -> None:
    config = run(parallel__pp=2, train__global_batch_size=4, train__micro_batch_size=1)
    config.model.num_hidden_layers, config.parallel.layer_costs = 4, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert stage_costs(config) == [1.0, 1.0]
    assert predicted_bubble(config) == pytest.approx(1 / 5)  # (p - 1) / (m + p - 1)
    config.parallel.layer_costs[-1] = 4.0  # all layers on one stage, the head's equal on the other: the same work again
    config.parallel.partition = [4, 0]
    assert predicted_bubble(config) == pytest.approx(1 / 5)
    config.parallel.partition = [3, 1]  # 3 and 5 of 8: in a step of 3 + 4 * 5 each 4 * 8 of work are done on two ranks
    assert predicted_bubble(config) == pytest.approx(1 - 4 * 8 / (2 * (3 + 4 * 5)))
    assert predicted_bubble(run()) is None


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    assert describe([9.0, 1.0, 3.0, 2.0], [0.9, 0.2, 0.4], 1.5, 0.25) == [
        "step time 1.5 s predicted, 2 s measured (median), +33.3%; bubble 25.0% predicted, 30.0% measured"
    ]
    assert describe([9.0], [], None, 0.25) == ["bubble 25.0% predicted, not measured"]
    assert describe([2.0], [], 2.0, None, find_device("h100")) == [
        "step time 2 s predicted for h100 (1.818 to 2.2 s in 80 % of published runs), 2 s measured (median), +0.0%"
    ]
    assert "predicted for l40s, 2 s" in describe([2.0], [], 2.0, None, find_device("l40s"))[0]
    assert describe([9.0], [0.1], None, None) == []


# ---- what only a GPU has


def on_gpu(tmp_path: Path, **profiling: Any) -> Any:
    """As much of a trainer as the instruments ask for."""
    mesh = SimpleNamespace(rank=1, world=SimpleNamespace(size=2), activity=Activity())
    config = run(**{f"profiling__{name}": value for name, value in profiling.items()}, logging__interval=2)
    return SimpleNamespace(device=torch.device("cuda"), mesh=mesh, config=config, run_dir=tmp_path)


def test_memory_and_sensors_are_read_at_the_interval_and_a_broken_sensor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def broken(device: torch.device) -> float:
        reads.append("broken")
        raise RuntimeError("not supported")

    statistics = {"allocated_bytes.all.current": 5, "reserved_bytes.all.current": 7, "num_alloc_retries": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    monkeypatch.setattr(gpu, "find_spec", lambda name: True)
    monkeypatch.setattr(gpu, "SENSORS", {"gpu_power_w": lambda device: 650, "gpu_clock_mhz": broken})
    instrument = gpu.GpuSensors(on_gpu(tmp_path))
    results = [instrument.numbers(example(step, tokens_per_second=10.0)) for step in (1, 2, 3, 4)]
    memory_numbers = {"memory_allocated_bytes": 5, "memory_reserved_bytes": 7, "allocation_retries": 1}
    assert results[0] == results[2] == {"tokens_per_second_per_gpu": 5.0}
    assert results[1] == results[3] == results[0] | memory_numbers | {"gpu_power_w": 650.0}
    assert reads == ["broken"]


def test_a_memory_snapshot_is_written_after_its_step_on_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: done.append("records"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("memory"))
    for ranks in ([], [1]):  # by default rank 0, and this is rank 1
        instrument = tracing.MemorySnapshot(on_gpu(tmp_path, memory_snapshot=2, ranks=ranks))
        for number in (1, 2, 3):
            instrument.after(number)
    assert done == ["records"] and [file.name for file in (tmp_path / "traces").iterdir()] == [
        "memory_rank_00001_step_00000002.pickle"
    ]
