"""The instruments of a run on real ranks: phases and the profiler's trace, a link test, and a rank that runs out of
memory."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch.distributed as dist

from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, write_config
from megalite.launch.environment import compare_ranks, facts
from megalite.monitoring import links, starts
from megalite.monitoring.observers import Observer, observers
from megalite.monitoring.phases import PHASES
from megalite.planner.time.prediction import device_of
from megalite.training.fit import fit
from tests.support.configs import case_of, config_of, write_tokens
from tests.support.jobs import make_trainer
from tests.support.spaces.layouts import Case

MODEL: Case = case_of(tied=False, kv_heads=2, vocab_size=96, layers=2, masked=False, dropout=0.0, pp=2)
STEPS = 4


class Computed(Observer):
    """What the runtime itself has measured of each step's actions."""

    def __init__(self, trainer: Any):
        self.runtime = trainer.parts.runtime
        self.steps: list[dict[str, float]] = []

    def after(self, step: int) -> None:
        ran = [(repr(one.action)[0], one.end - one.start) for one in self.runtime.ran]
        phases = {"forward": "F", "backward": "BW"}
        self.steps.append({phase: sum(each for kind, each in ran if kind in kinds) for phase, kinds in phases.items()})


DEVICE = """
tflops: {fp32: 0.1}
sustained: 1.0
multiprocessors: 1
memory_gib: 8
memory_gbs: 10
within: {gbs: 1, latency_us: 100}
between: ib200
gpus_per_node: 2
host: pcie4
"""


class Frame(Observer):
    """How long each step takes, from after the other observers have heard that it begins until they have heard that it
    has ended."""

    def __init__(self) -> None:
        self.begin, self.seconds = 0.0, list[float]()

    def before(self, step: int) -> None:
        self.begin = perf_counter()

    def after(self, step: int) -> None:
        self.seconds.append(perf_counter() - self.begin)


def fitted(context: Any, config: dict[str, Any]) -> tuple[list[dict[str, float]], list[float], str]:
    """A run with all instruments: the time that its runtime has computed and the time of each step, by clocks of their
    own; its output."""
    trainer = make_trainer(context, config)
    write_config(trainer.config, trainer.run_dir)
    computed, frame = Computed(trainer), Frame()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            fit(
                trainer, [*observers(trainer, facts(trainer.device, 1), device_of(trainer.config, "")), computed, frame]
            )
    finally:
        trainer.close()
        gc.unfreeze()
        gc.enable()
    return computed.steps, frame.seconds, printed.getvalue()


def test_a_run_with_parts_of_sequences_writes_how_unequal_they_are(ranks: Any, tmp_path: Path) -> None:
    case = {**MODEL, "pp": 1, "cp": 2, "context": "ring", "microbatches": 2, "masked": True}
    prefix = write_tokens(tmp_path, MODEL["vocab_size"])
    config = config_of(case, prefix, run={"dir": str(tmp_path), "name": "run"}, logging={"interval": 1})
    config["train"]["steps"] = 3
    ranks.run(2, fitted, config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(1 <= line["context_imbalance_predicted"] < 2 for line in lines)
    assert [line["step"] for line in lines if 1 <= line.get("context_imbalance_measured", 0) <= 2] == [2, 3]


def test_a_run_writes_where_its_time_goes_and_a_trace_with_its_actions(ranks: Any, tmp_path: Path) -> None:
    """Two stages, four microbatches; rank 1 is profiled in steps 3 and 4."""
    prefix = write_tokens(tmp_path, MODEL["vocab_size"])
    hardware = tmp_path / "here.yaml"
    hardware.write_text(DEVICE)
    profiling = {"ranks": [1], "steps": [3, 4], "timeline": True, "hardware": str(hardware)}
    config = config_of(
        {**MODEL, "microbatches": 4}, prefix, run={"dir": str(tmp_path), "name": "run"}, profiling=profiling
    )
    config["train"]["steps"] = STEPS
    computed, seconds, printed = ranks.run(2, fitted, config)[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, inside, whole in zip(lines, computed, seconds, strict=True):
        phase_s = {phase: line[f"time_{phase}_s"] for phase in PHASES}
        assert min(phase_s.values()) >= 0, phase_s
        assert all(phase_s[phase] > 0 for phase in PHASES if phase != "communication"), phase_s
        assert phase_s["forward"] >= inside["forward"] > 0 and phase_s["backward"] >= inside["backward"] > 0
        assert sum(phase_s.values()) <= whole
        assert line["tokens_per_second_per_gpu"] == line["tokens_per_second"] / 2
    compared = [(line["step"], line["ranks_of_step"]) for line in lines if "ranks_of_step" in line]
    assert compared == [(2, 1)], "nothing travels while rank 1 is profiled"
    assert {lines[1]["slowest_rank"], lines[1]["fastest_rank"]} == {0, 1}

    events = json.loads((tmp_path / "run" / "traces" / "profile_rank_00001.json").read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    actions = [f"{kind}1.{microbatch}" for kind in "FB" for microbatch in range(4)]
    assert {name: names[name] for name in (*actions, "norm and update")} == dict.fromkeys(
        (*actions, "norm and update"), 2
    )
    assert not any(name.startswith("pipeline message") for name in names), "a wait is part of its action"
    assert not (tmp_path / "run" / "traces" / "profile_rank_00000.json").exists()
    assert "steps 3 to 4 are recorded" in printed and "1f1b, steps 3 to 4: bubble_fraction" in printed
    last = printed.splitlines()[-2]
    assert last.startswith("step time ") and " measured (median), " in last and "%; bubble " in last, printed
    predicted = json.loads((tmp_path / "run" / "prediction.json").read_text())
    assert f"step time {predicted['step_time_s']:.4g} s predicted" in last
    assert f"bubble {predicted['bubble_fraction']:.1%} predicted" in last
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["ranks"] == 2
    (start,) = starts.read(tmp_path / "run")
    assert start.step == 0 and start.environment == environment and start.options["parallel"]["pp"] == 2
    assert start.prediction.items() <= predicted.items() and start.prediction["step_time_s"] > 0


def look_around(context: Any, config: dict[str, Any]) -> tuple[list[links.LinkTraffic], list[str], str]:
    """The links, what is worth knowing of four equal ranks, and why they refuse to start where rank 2 has another
    torch."""
    trainer = make_trainer(context, config)
    store = dist.distributed_c10d._get_default_store()
    own = {
        "kind": "cpu",
        "megalite": "1",
        "torch": "2.13",
        "NCCL": None,
        "driver": None,
        "device": "CPU",
        "host": "h",
        "shared_memory": None,
        "gpu": None,
    }
    try:
        links_measured = links.measure(trainer.mesh, trainer.device, seconds=0.0)
        notes = compare_ranks(own, dist.PrefixStore("equal", store), context.rank, 4)
        with pytest.raises(ConfigError) as refused:
            odd = own | ({"torch": "2.0"} if context.rank == 2 else {})
            compare_ranks(odd, dist.PrefixStore("different", store), context.rank, 4)
        return links_measured, notes, str(refused.value)
    finally:
        trainer.close()


def test_every_link_is_measured_once_and_another_torch_is_refused_by_all_ranks(ranks: Any, tmp_path: Path) -> None:
    config = config_of({**MODEL, "pp": 1, "dp": 4}, write_tokens(tmp_path, MODEL["vocab_size"]))
    answers = ranks.run(4, look_around, config)
    assert all(each == answers[0] for each in answers)
    measurements, notes, refused = answers[0]
    assert notes == [] and "\n  torch: 2.13 on 3 of 4 ranks, but 2.0 on rank 2\n" in refused
    assert sorted((link.source, link.target) for link in measurements) == sorted(
        (rank, (rank + stride) % 4) for rank in range(4) for stride in (1, 2)
    )
    assert all(link.bytes_per_second > 0 for link in measurements)


# ---- out of memory


def run_rank(rank: int, port: int, arguments: list[str], output: str) -> None:
    """One training process, as torchrun on a machine of its own would start it."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.argv = ["pretrain.py", *arguments]
    from megalite.commands import train
    from megalite.launch.process import shutdown

    train.main()
    shutdown()


def test_a_rank_without_memory_says_what_may_help_and_the_other_one_why_it_ends(tmp_path: Path) -> None:
    config = config_of({**MODEL, "pp": 1, "dp": 2, "microbatches": 2}, write_tokens(tmp_path, MODEL["vocab_size"]))
    config |= {
        "run": {"dir": str(tmp_path), "name": "run", "timeout": "60s"},
        "faults": {"inject": "oom:rank=0,step=3"},
    }
    config["train"]["recompute"] = "selective"
    write_config(from_dict(config), tmp_path)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [tmp_path / f"rank{rank}" for rank in range(2)]
    arguments = ["--config", str(tmp_path / "config.yaml")]
    start = multiprocessing.get_context("forkserver").Process
    processes = [start(target=run_rank, args=(rank, store.port, arguments, str(outputs[rank]))) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [1, 1], [output.read_text() for output in outputs]
    finally:
        for process in processes:
            process.kill()
    first, second = (output.read_text() for output in outputs)
    assert "\nrank 0 in step 3, between steps: out of memory: injected: no memory is left\n" in first
    ladder = [line.split() for line in first.splitlines() if line.startswith("  --")]
    assert ladder and all(line[-3] == "saves" and line[-1] == "MiB" for line in ladder), first
    options = [line[0].removeprefix("--") for line in ladder]
    assert (
        "parallel.zero" in options
        and "parallel.sequence_parallel" not in options
        and ["--train.recompute", "selective"] not in [line[:2] for line in ladder]
    )
    last = second.splitlines()[-1]
    assert "(rank 0 was lost first: it ran out of memory; host " in last and last.endswith(
        ", last known in step 3, between steps)"
    ), second
    assert "Traceback" not in first + second
