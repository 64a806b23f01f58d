"""megalite first-light without a GPU: what a part's failure costs, what is compared with what, and that the rehearsal's
first part runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megalite_kernels import activation, device_routes

from benchmarks import kernels, plan, profiled, report
from benchmarks.first_light import (
    exchange,
    graphs,
    layout_rank,
    layouts,
    machine,
    predictions,
    routes,
    run,
    speeds,
    step,
    values,
)
from benchmarks.first_light.exchange_rank import bus_share
from benchmarks.first_light.parts import NAMES, PARTS, limit
from benchmarks.first_light.rows import Row, Scene, guarded, row
from benchmarks.first_light.show import sentence, show
from megalite.commands.first_light import main
from megalite.config.load import from_dict
from megalite.config.rules import check
from megalite.launch.local_ranks import run_ranks
from megalite.planner.hardware.devices import find_device, read_device
from tests.conftest import HAS_GPU

H200 = "NVIDIA H200"


def scene(seconds: float = 100.0, **changes: Any) -> Scene:
    return replace(Scene((), True, True, time.monotonic() + seconds, {}), **changes)


# ---- the command and its parts


def streaming(
    answers: dict[str, tuple[list[Row], str | None]], seen: list[dict[str, Any]]
) -> Callable[..., str | None]:
    def stream(module: str, spec: dict[str, Any], hear: Callable[[Row], None], **options: Any) -> str | None:
        seen.append({**spec, **options})
        rows_found, problem = answers.get(spec["part"], ([row("figure", "measured")], None))
        for each in rows_found:
            hear(each)
        return problem

    return stream


def test_a_part_that_ends_badly_costs_itself_and_the_file_has_what_it_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []
    answers = {
        "values": ([row("kernel", "passed")], None),
        "step": ([row("a step", "measured", seconds=1.0)], "did not finish within 9 s"),
        "layouts": ([], "ended with status -9: no message"),
    }
    monkeypatch.setattr(report, "stream", streaming(answers, seen))
    output = tmp_path / "found.json"
    written: list[int] = []
    content = run.run(
        run.Order(NAMES, output, [H200], short=True),
        lambda line: written.append(len(json.loads(output.read_text())["parts"]) if output.exists() else 0),
    )
    assert content == json.loads(output.read_text()) and [each["part"] for each in seen] == list(NAMES)
    assert content["parts"]["step"]["rows"][0]["seconds"] == 1.0
    assert content["verdict"]["failed"] == ["layouts: layouts"] and content["verdict"]["missing"] == ["step: step"]
    assert not content["verdict"]["proved"] and max(written) == len(NAMES)  # written as it goes, before the end
    assert seen[-1]["earlier"]["values"] == [row("kernel", "passed")] and seen[-1]["environment"] == {}
    assert sum(limit(part, rehearse=False, short=True) for part in PARTS) == 480


def test_parts_that_are_not_run_again_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "stream", streaming({"values": ([row("kernel", "passed")], None)}, []))
    output = tmp_path / "found.json"
    run.run(run.Order(NAMES, output, []), lambda line: None)
    monkeypatch.setattr(
        report, "stream", streaming({"links": ([row("all-reduce", "missing", "why")], None)}, seen := [])
    )
    # in a rehearsal nothing may be missing
    assert main(["--rehearse", "--parts", "links", "--output", str(output)]) == 1
    content = json.loads(output.read_text())
    assert list(content["parts"]) == list(NAMES) and content["verdict"]["missing"] == ["links: all-reduce"]
    assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in seen] == [""]
    printed = capsys.readouterr().out
    assert "all-reduce" in printed and "why" in printed and sentence(content["verdict"]).splitlines()[0] in printed
    monkeypatch.setattr("benchmarks.first_light.show.find_spec", lambda name: None)
    show(content, "here")  # without rich
    assert "missing   why" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rehearse", "--parts", "link"], "--parts link does not exist. Legal values: machine, values"),
        ([], "no NVIDIA GPU found. Pass --rehearse to run the same code on the CPU."),
        (
            ["--rehearse", "--parts", "links", "--calibrate", "here.yaml"],
            "--calibrate requires the part predictions",
        ),
    ],
)
def test_what_can_not_be_done_is_one_message(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "gpus", list)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_the_first_part_of_a_rehearsal_runs_in_its_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rehearsal.json"
    assert main(["--rehearse", "--parts", "machine", "--output", str(output), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    results = {each["name"]: each for each in content["parts"]["machine"]["rows"]}
    assert results["versions"]["versions"]["torch"] == torch.__version__
    assert results["GPUs, their links and clocks"]["detail"] == "not available on this machine: no GPU found"
    assert content["rehearsal"] and content["verdict"]["not_run"] == list(NAMES[1:])


def test_an_error_is_a_row_without_paths_of_the_machine() -> None:
    def broken() -> Row:
        raise ValueError(f"{report.ROOT}/benchmarks is wrong\nand more")

    row = guarded("a proof", "proof", broken)
    assert row["verdict"] == "failed" and guarded("a figure", "measurement", broken)["verdict"] == "missing"
    assert "in broken" in row["traceback"] and f"{report.ROOT}/" not in row["traceback"]


# ---- machine


def test_known_troubles_are_those_of_these_versions() -> None:
    def named(versions: dict[str, str | None], capability: str, gpus: int) -> str:
        return " ".join(each["source"] for each in machine.troubles(versions, [capability], gpus))

    old = {"torch": "2.11.0", "cudnn": "9.10.2", "nccl": "2.28.9", "triton": "3.6.0"}
    assert (
        "cudnn-frontend/issues/160" in named(old, "9.0", 1)
        and "196678" in named(old, "9.0", 1)
        and "nccl/issues/418" in named(old, "9.0", 1)
    )
    new = {**old, "cudnn": machine.cudnn_version(91501), "torch": "2.13.0", "triton": "3.7.1"}
    assert "cudnn-frontend/issues/160" not in named(new, "9.0", 8) and "418" not in named(new, "9.0", 8)
    assert "196678" not in named(new, "10.0", 8) and "193183" in named(new, "10.0", 8)
    assert named(dict.fromkeys(old), "8.0", 2) == ""  # what is unknown fulfils nothing
    assert "nccl/issues/1685" not in named({**old, "nccl": "2.19.3"}, "9.0", 8) and "nccl/issues/1685" in named(
        old, "9.0", 8
    )


# ---- values


@pytest.mark.skipif(HAS_GPU, reason="interprets kernels in this process")
def test_a_kernel_is_compared_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {each.name: each for each in values.CHECKS}
    for name in ("SwiGLU", "attention with documents"):
        assert values.compared(checks[name], name, checks[name].rehearsed, scene())["verdict"] == "passed"
    exact = activation.gated_forward

    def rough(x: torch.Tensor, act: str) -> torch.Tensor:
        return exact(x, act) * (1.0 if x.dtype == torch.float64 else 1 + 1e-4)

    monkeypatch.setattr(
        activation, "gated_forward", lambda x, act: rough(x, act) if activation.takes_triton(x) else exact(x, act)
    )
    row = guarded("SwiGLU", "proof", lambda: values.compared(checks["SwiGLU"], "SwiGLU", torch.float32, scene()))
    assert row["verdict"] == "failed" and "error" in row["detail"]


@pytest.mark.parametrize("parallel", [False, True])
def test_what_pytest_says_is_kept_where_it_was_cut(parallel: bool) -> None:
    lines = [
        ("PASSED", "tests/a.py::one[x 1-y]"),
        ("FAILED", "tests/a.py::two"),
        ("ERROR", "tests/b.py::three"),
        ("SKIPPED", "tests/b.py::four"),
    ]
    done = [f"[gw1] [ 50%] {outcome} {name}" if parallel else f"{name} {outcome} [ 50%]" for outcome, name in lines]
    text = "\n".join([*done, "FAILED tests/a.py::two - AssertionError: 1 != 2"])
    summary, two, three, rest = values.outcomes(text, late=True, limit=9.0)
    assert summary["verdict"] == "failed" and summary["counts"] == {"PASSED": 1, "FAILED": 1, "ERROR": 1, "SKIPPED": 1}
    assert (two["name"], two["detail"]) == ("a.py::two", "AssertionError: 1 != 2") and three["verdict"] == "failed"
    assert rest["verdict"] == "missing"
    assert [each["verdict"] for each in values.outcomes(done[3], False, 9.0)] == ["absent"]
    assert [each["verdict"] for each in values.outcomes(done[0], False, 9.0)] == ["passed"]
    assert [each["verdict"] for each in values.outcomes("a usage error", False, 9.0)] == ["failed"]


# ---- a step, and routes


def test_idle_time_is_what_no_kernel_covers() -> None:
    spans = [("a", 0.0, 4.0), ("b", 2.0, 3.0), ("c", 6.0, 8.0), ("d", 7.0, 10.0)]
    assert profiled.idle(spans) == pytest.approx(0.2) and profiled.idle([]) is None
    listed, total = profiled.by_time([("a", 3.0), ("b", 8.0), ("a", 1.0)])
    assert total == 12 / profiled.STEPS and [each["name"] for each in listed] == ["b", "a"]
    assert listed[1] == {
        "name": "a",
        "calls": 2 / profiled.STEPS,
        "us": 4 / profiled.STEPS,
        "share": pytest.approx(1 / 3),
    }


def test_a_step_with_documents_has_them_where_their_tokens_end(tmp_path: Path) -> None:
    from megalite.data.dataset import build

    config = from_dict(step.configuration(step.StepCase("a step", {}, document=4), scene(), tmp_path))
    assert config.data.reset_positions
    check(config, 1)
    data, _ = build(config.data, 0)
    assert data.eos == 0


def test_the_fastest_routes_are_written_where_kernels_auto_reads_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_routes, "DIRECTORY", tmp_path / "routes")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    results = {
        "plain": {"cudnn": 2.0, "flash": 3.0},
        "documents": {"triton": 4.0},
        "weight_grad": {"addmm": 2.0, "mm_add": 1.5},
        "router": {"cast": 1.0},
        "fp8_block": {"triton": 1.0, "scaled_mm": 0.5},
    }
    routes._write(results, scene(gpus=(H200,), rehearse=False))
    read = device_routes.read(H200)
    assert (read.plain, read.documents, read.weight_grad, read.router, read.fp8_block, read.problem) == (
        "cudnn",
        "triton",
        "mm_add",
        "cast",
        "scaled_mm",
        None,
    )
    table = routes.table_of(scene(gpus=(H200,)))
    assert table["measured"]["ms"] == results


def test_a_rehearsal_times_the_reference_and_names_what_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    results = {each["name"]: each["verdict"] for each in routes.rows(scene())}
    assert (
        results["attention plain, reference: values"] == "passed"
        and results["attention documents, reference"] == "measured"
    )
    assert {results[f"attention {name}"] for name in ("plain, cudnn", "documents, flash_varlen")} == {"absent"}
    assert (
        results["weight gradient, addmm"] == results["router, out_dtype"] == "absent"
        and results["router, cast"] == "measured"
    )
    assert results["fp8 mxfp8, scaled_mm"] == "absent"
    assert (
        results["grouped product, no rows"] == results["bf16 products, sums of parts"] == "measured"
        and results["cuDNN, rows first"] == "absent"
    )


# ---- layouts


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_division_of_the_ranks_is_a_layout_and_legal(world: int, tmp_path: Path) -> None:
    place = layouts.RankMachine(scene(), world, tmp_path)
    table = layouts.layouts(world, on_gpu=True)
    divisions = {tuple(each.parallel.get(axis, 1) for axis in ("tp", "pp", "dp")) for each in table}
    assert divisions == {sizes for sizes in np.ndindex(world + 1, world + 1, world + 1) if prod(sizes) == world}
    for each in table:
        check(from_dict(place.config(each)), world, 1)
    assert {each.parallel.get("zero") for each in table} >= {0, 1, 2, 3} and len({each.name for each in table}) == len(
        table
    )


def write_result(path: Path, loss: float = 1.0, weight: float = 0.5) -> None:
    path.parent.mkdir(exist_ok=True)
    np.savez(path.with_suffix(".npz"), w=np.full(3, weight))
    scalars = [{"loss": loss, "grad_norm": 2.0}]
    path.with_suffix(".json").write_text(json.dumps({"scalars": scalars, "seconds": [0.1]}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"loss": 1.0001}, "step 1: loss is 1.0001, but 1 on one process"),
        ({"weight": 0.6}, "w differs by 0.1"),
    ],
)
def test_a_layout_that_differs_is_named(change: dict[str, float], said: str | None, tmp_path: Path) -> None:
    write_result(tmp_path / "0")
    write_result(tmp_path / "1", **change)
    comparison = layouts.compared(layouts.LayoutCase("dp 2", {"dp": 2}), tmp_path / "1", tmp_path / "0")
    assert (
        comparison["verdict"] == ("passed" if said is None else "failed") and (said or "within") in comparison["detail"]
    )


def test_graphs_are_compared_where_they_are_legal(tmp_path: Path) -> None:
    for case in graphs.cases(scene(gpus=(H200, H200))):
        check(from_dict(case.config(tmp_path, graphs=True)), case.ranks, 1)


@pytest.mark.parametrize(
    ("problem", "change", "verdict", "said"),
    [
        ("", {}, "passed", "; equal bitwise"),
        ("", {"weight": 0.500001}, "passed", "; not equal bitwise"),
        ("", {"loss": 1.0001}, "failed", "step 1: loss is 1.0001, but 1 without graphs"),
        ("a rank ended with status 1\nCUDA error", {}, "failed", "a rank ended with status 1: CUDA error"),
        ("out of time\n", {}, "missing", "out of time"),
    ],
)
def test_graphs_that_differ_from_the_eager_step_are_named(
    problem: str,
    change: dict[str, float],
    verdict: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(place: Any, name: str, ranks: int, spec: dict[str, Any], seconds: float) -> tuple[Path, str]:
        assert [config["train"]["graphs"] for _, config in spec["configs"]] == [False, True] and spec["deterministic"]
        write_result(tmp_path / "0")
        write_result(tmp_path / "1", **change)
        return tmp_path, problem

    monkeypatch.setattr(layouts.RankMachine, "start", start)
    on_gpu = scene(gpus=(H200,))
    result = graphs.proof(graphs.cases(on_gpu)[0], on_gpu, tmp_path)
    assert result["verdict"] == verdict and said in result["detail"], result


def test_a_layout_that_hangs_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks start again with the next one; what had no time is missing, and has not failed."""
    starts: list[list[int]] = []

    def start(
        place: layouts.RankMachine, name: str, ranks: int, spec: dict[str, Any], seconds: float, patience: float = 0.0
    ) -> tuple[Path, str]:
        directory, numbers = tmp_path / name, [number for number, _ in spec["configs"]]
        directory.mkdir()
        if name == "alone":
            write_result(directory / "0")
            return directory, ""
        starts.append(numbers)
        for number in numbers[: numbers.index(1)] if 1 in numbers else numbers[:1]:
            write_result(directory / str(number))
        return directory, "no progress for 60 s" if 1 in numbers else "out of time"

    monkeypatch.setattr(layouts.RankMachine, "start", start)
    table = [layouts.LayoutCase(f"{number}", {"dp": 2}) for number in range(4)]
    results = [(each["name"], each["verdict"]) for each in layouts.RankMachine(scene(), 2, tmp_path).compare(table)]
    assert results == [("0", "passed"), ("1", "failed"), ("2", "passed"), ("3", "missing")] and starts == [
        [0, 1, 2, 3],
        [2, 3],
    ]


@pytest.mark.parametrize("left, verdict", [(100.0, "failed"), (4.0, "missing")])
def test_a_killed_rank_that_had_no_time_to_be_named_is_missing(
    left: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        layouts.RankMachine, "start", lambda place, *args, **options: (tmp_path, "a rank ended with status 137")
    )
    assert layouts.RankMachine(scene(left), 2, tmp_path).kill_one()["verdict"] == verdict


def test_a_save_in_the_background_is_resumed_from(tmp_path: Path) -> None:
    place = layouts.RankMachine(scene(), 2, tmp_path)
    one = {"dp": 1}
    table = (
        layouts.LayoutCase("", one),
        layouts.LayoutCase("", one, {"checkpoint": {"async_save": True, "load": "none"}}),
    )
    for number, each in enumerate(table):
        layout_rank.train(number, from_dict(place.config(each)), 4, tmp_path, torch.device("cpu"))
    assert len(list((tmp_path / "layout" / "checkpoints").glob("step_*"))) == 1
    (tmp_path / "a").mkdir()
    assert (
        layouts.compared(replace(table[1], tolerance=(0.0, 0.0)), tmp_path / "1", tmp_path / "0")["verdict"] == "passed"
    )


def test_ranks_may_end_by_themselves_after_one_has_failed(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; r = os.environ['RANK']; sys.exit(3) if r == '1' else (time.sleep(float(sys.argv[2])), "
        "open(sys.argv[1], 'w'))"
    )
    for patience, takes in ((0.0, 600), (600.0, 0.5)):
        said = tmp_path / str(patience)
        assert run_ranks(2, ["-c", code, str(said), str(takes)], patience=patience) == 3
        assert said.exists() is (patience > 0)


# ---- links, kernels, predictions


def test_the_bus_and_the_planner_count_the_same_bytes() -> None:
    device = find_device("h100")
    for name, share in (
        ("all-reduce", 1.5),
        ("all-gather", 0.75),
        ("reduce-scatter", 0.75),
        ("all-to-all", 0.75),
        ("message", 1.0),
    ):
        assert bus_share(name, 4) == share
        more = exchange.assumed(name, 2e9, 4, device) - exchange.assumed(name, 1e9, 4, device)
        assert more == pytest.approx(share * 1e9 / device.within.bandwidth)


def test_kernels_are_rows_with_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(n_regs=64, n_spills=2, metadata=SimpleNamespace(shared=1024, num_warps=4))
    function = SimpleNamespace(
        __name__="_forward", device_caches={0: ({"key": compiled, "other": SimpleNamespace()}, {})}
    )
    monkeypatch.setitem(
        profiled.sys.modules, "megalite_kernels.made_up_triton", SimpleNamespace(_forward=function, WIDE=3)
    )
    created = [each for each in profiled.launched_kernels() if each["registers"] == 64]
    assert created == [{"name": "_forward", "warps": 4, "registers": 64, "spills": 2, "shared": 1024}]
    device = {"name": H200, "bytes_per_second": 4e12, "flops": 7e14}
    good = {"kernel": "norm", "shape": "4", "us": 5.0, "gbps": 9.0, "peers": {}, "compiled": created, "error": None}
    late = {"group": "attention", "kernel": "attention", "error": "did not finish within 9 s"}
    answers = {"device": [device, good], "attention": [late]}
    monkeypatch.setattr(kernels, "measure_groups", lambda job, *_: answers[job[0]])
    first, norm, missing = speeds.rows(scene(gpus=(H200,), rehearse=False))
    assert (
        first["flops"] == 7e14 and norm["detail"].endswith("64 registers, 2 spills") and missing["verdict"] == "missing"
    )


MEASURED = {
    "products": {512: 1e5, 8192: 7e5},
    "memory_gbs": 4000.0,
    "loss_gbs": 3000.0,
    "attention_gflops": [5e5, 4e5],
    "host_us": 6.0,
    "host": {"gbs": 50.0, "latency_us": 9.0},
}


@pytest.mark.parametrize("name", [H200, "A GPU that nobody knows"])
def test_a_calibrated_gpu_is_a_device_of_the_planner(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    properties = SimpleNamespace(multi_processor_count=132, total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    plan.write_device(tmp_path / "here.yaml", plan._gpu(dict(MEASURED), [name]))
    device, table = find_device(str(tmp_path / "here.yaml")), find_device("h200")
    assert device.peak("bf16") * device.sustained == pytest.approx(700e12, rel=1e-3) and device.bandwidth == 4e12
    assert device.host.bandwidth == 50e9 and device.host_time == 6e-6 and device.host_memory == table.host_memory
    known = name == H200
    assert device.within.bandwidth == pytest.approx(
        table.within.bandwidth if known else 50e9, rel=1e-3
    ) and device.per_node == (8 if known else 1)
    two = plan._gpu({**MEASURED, "within": {"gbs": 300.0, "latency_us": 1.0}}, [name] * 2)
    assert read_device("two", two).within.bandwidth == 300e9


def test_a_step_stands_beside_its_predictions(tmp_path: Path) -> None:
    case = step.StepCase("a step", {})
    config = step.configuration(case, scene(), tmp_path)
    measured = row(
        "a step",
        "measured",
        seconds=2.0,
        predicted_seconds=1.0,
        documents=True,
        sequence_length=16,
        peak_gib=2.0,
        predicted_gib=3.0,
    )
    measured |= {"config": {name: value for name, value in config.items() if name not in ("run", "data")}}
    device = read_device(
        "here",
        plan._cpu({**MEASURED, "within": {"gbs": 1.0, "latency_us": 1.0}, "kernel_us": 2.0}, 2) | {"host_us": 0.0},
    )
    time_row = predictions._step(measured, device)
    from megalite.planner.time.prediction import step_seconds

    assert time_row["predicted"] == {"calibration": step_seconds(from_dict(config), device), "table": 1.0}
    assert time_row["ratios"]["table"] == 0.5 and "documents are not included in the prediction" in time_row["detail"]
