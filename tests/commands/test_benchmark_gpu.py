"""What tools/benchmark.py does on a GPU, without one: every case interpreted, what fails or is late, the judgement, and
the page."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megalite_kernels import backend
from megalite_kernels.launch import Variant

from benchmarks import command as tool
from benchmarks import gpu_step, kernel_page, kernel_run, kernels, report, tuning
from benchmarks.kernel_cases import CASES, Contest, KernelCase, Sizes, Target
from megalite.config.load import from_dict
from megalite.model.cost.flops import model_flops_per_token
from tests.conftest import HAS_GPU
from tests.kernels.compiling import MODULES, architectures
from tests.kernels.variants import launches

pytestmark = pytest.mark.skipif(HAS_GPU, reason="interprets kernels in this process")
TOOLS = Path(__file__).resolve().parents[2] / "tools"
DEVICE = {
    "name": "A GPU",
    "bytes_per_second": 1e12,
    "flops": 1e14,
    "limit_bytes_per_second": 2e12,
    "torch": "2",
    "triton": "3",
    "liger": None,
}


@pytest.fixture
def interpreted() -> Iterator[None]:
    backend.select("triton")
    yield
    backend.select("torch")


def test_every_case_is_measured_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.main(["kernels", "--smoke", "--machine", "here", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "here-kernels.json").read_text())
    rows = content["results"]
    own = {row["group"] for row in rows}
    assert own >= set(CASES) and own <= set(kernels.GROUPS)
    assert [row["error"] for row in rows] == [None] * len(rows)
    for row in rows:
        assert row["us"] > 0 and f"{row['us']:,.0f}" in printed and row["kernel"] in printed
        speed, limit = (
            (row["gbps"], content["device"]["bytes_per_second"] / 1e9)
            if row["gbps"]
            else (row["tflops"], content["device"]["flops"] / 1e12)
        )
        assert row["of_measured"] == pytest.approx(speed / limit)
        if row["gbps"]:
            assert row["times_limit"] == pytest.approx(0.9 * 4800 / row["gbps"])
        for name, peer in row["peers"].items():
            assert (
                peer["ratio"] == pytest.approx(peer["us"] / row["us"])
                if "us" in peer
                else name == "Liger" and "liger_kernel" in peer["error"]
            )
    judged = {target["kernel"] for target in content["targets"]}
    assert {
        "cross-entropy, both ways",
        "add + RMSNorm, forward",
        "AdamW",
        "SwiGLU, backward",
        "rotary + split, forward",
    } <= judged


def fails() -> Any:
    raise RuntimeError("out of resource: shared memory\nand a second line")


def test_what_fails_says_so_and_ends_nothing() -> None:
    def make() -> Contest:
        return Contest(lambda: time.sleep(0.001), {"slower": lambda: lambda: time.sleep(0.003), "broken": fails})

    target = Target("time / limit", lambda row: row["times_limit"], 1.0)
    cases = [
        KernelCase("bad", "1", fails, bytes=1),
        KernelCase("good", "2", make, bytes=10e9, targets=(target,)),
        KernelCase("late", "3", make),
    ]
    clock = iter([0.0, 0.0, 0.0, 0.0, 9.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        bad, good, late = kernel_run.rows(cases, DEVICE, until=1.0)
    assert (bad["error"], bad["us"]) == ("RuntimeError: out of resource: shared memory", None)
    assert (late["error"], late["us"]) == ("TimeoutError: out of time", None)
    assert good["error"] is None and good["us"] >= 1000 and good["peers"]["broken"]["error"] == bad["error"]
    assert good["peers"]["slower"]["us"] >= 3000
    assert good["peers"]["slower"]["ratio"] == pytest.approx(good["peers"]["slower"]["us"] / good["us"])
    assert good["times_limit"] == pytest.approx(good["us"] / 5000)  # 10 GB at 2 TB/s are 5 ms
    (judged,) = good["targets"]
    assert judged["met"] is (good["times_limit"] <= 1.0) and judged["wanted"] == "≤ 1"


def fake_stream(answers: dict[str, Any]) -> Callable[..., str | None]:
    def stream(module: str, spec: dict[str, Any], hear: Callable[[dict[str, Any]], None], **options: Any) -> str | None:
        (group,) = spec["groups"]
        if group == "device":
            hear(DEVICE)
        elif answers[group] is not None:
            hear(
                {
                    "group": group,
                    "kernel": "k",
                    "shape": "1",
                    **kernel_run.NOTHING,
                    "us": answers[group],
                    "targets": [],
                    "error": None,
                }
            )
        return None if group == "device" or answers[group] is not None else "ended with status -9: no message"

    return stream


def test_a_broken_process_costs_its_group_and_other_groups_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "stream", fake_stream({"norm": 5.0, "swiglu": None}))
    kept = [{"group": group, "kernel": "old", "shape": "", "us": 1.0, "error": None} for group in ("norm", "rotary")]
    saved: list[dict[str, Any]] = []

    def save(content: dict[str, Any]) -> Path:
        saved.append(content)
        return report.write("kernels", content, tmp_path, None)

    path = kernels.compare(
        ["swiglu", "norm"], tune=False, smoke=False, kept=kept, save=save, progress=lambda line: None
    )
    assert path.name == "a-gpu-kernels.json" and kernels.earlier(path) == saved[-1]["results"] and len(saved) == 3
    by_group = {row["group"]: (row.get("us"), row["error"]) for row in saved[-1]["results"]}
    assert by_group == {
        "norm": (5.0, None),
        "rotary": (1.0, None),
        "swiglu": (None, "ended with status -9: no message"),
    }


def test_a_process_that_does_not_end_is_ended() -> None:
    heard: list[dict[str, Any]] = []
    failure = report.stream("tests.commands.sleeper", {"seconds": 3600}, heard.append, environment={}, limit_s=1.0)
    assert failure == "did not finish within 1 s"
    failure = report.stream("tests.commands.sleeper", {"fails": "so"}, heard.append, environment={}, limit_s=120.0)
    assert failure == "exited with status 1: so"
    assert heard[-1] == {"said": "so"}


def test_tuning_launches_what_it_says(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, int]] = []
    launch = Variant.launch

    def noted(self: Variant, grid: tuple[int, ...], *args: object) -> None:
        launched.append((self.constants["TILE"], self.warps))
        launch(self, grid, *args)

    monkeypatch.setattr(Variant, "launch", noted)
    cases = list(CASES["adamw"](Sizes("cpu", True)))[:1]
    (row,) = tuning.tune(cases, kernel_run.measure, smoke=True, until=math.inf)
    assert launched == [(2048, 4), (1024, 4)] and list(row["tried"]) == ["table", "TILE 1024, warps 4"]
    assert row["failed"] == {} and row["best_us"] == min(row["tried"].values()) and row["us"] == row["tried"]["table"]
    next(iter(cases)).make().ours()
    assert launched[-1] == (2048, 4), "the table is as before"


def test_every_kernel_has_settings_that_it_knows() -> None:
    for name in MODULES:
        module = importlib.import_module(f"megalite_kernels.{name}")
        for variant in (launch.variant for launch in launches(name, architectures(name)[-2])):
            settings = tuning.SETTINGS[name, variant.kernel.fn.__name__]
            assert all(setting.constants.keys() <= variant.constants.keys() for setting in settings)
            assert all(hasattr(module, table) for setting in settings for table in setting.tables)


def result(step: float, flops: float = 8e14) -> dict[str, Any]:
    memory = {"device": "NVIDIA H200", "peak_allocated": 2**30, "peak_reserved": 2**31}
    return {"seconds": [step, 9.0, step], "peak_flops": flops, **memory}


def test_steps_on_a_gpu_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real shapes; each run's time is made up."""
    specs: list[dict[str, Any]] = []

    def launch(module: str, spec: dict[str, Any], **options: Any) -> dict[str, Any]:
        specs.append(spec)
        if spec["config"]["train"]["compile"] and spec["weights"] is None:
            raise report.BenchmarkError(
                "benchmarks.transformers_peer on 1 ranks failed:\nTraceback\nOutOfMemoryError: CUDA out of memory"
            )
        return result(0.25 if module == "benchmarks.trainer_run" else 0.3)

    monkeypatch.setattr(report, "launch", launch)
    path = gpu_step.compare(
        threads=2,
        smoke=False,
        compiled=False,
        save=lambda content: report.write("step", content, tmp_path, None),
        progress=lambda line: None,
    )
    content = json.loads(path.read_text())
    assert path.name == "nvidia-h200-step.json" and {spec["device"] for spec in specs} == {"cuda"}
    own, peer, layers, _, mixed, _ = content["results"]
    config = from_dict(specs[0]["config"])
    assert (config.model.num_hidden_layers, config.model.tie_word_embeddings, config.train.precision) == (
        16,
        True,
        "bf16",
    )
    assert own["tokens_per_second"] == pytest.approx(4 * 4096 / 0.25)
    flops = own["tokens_per_second"] * model_flops_per_token(config.model, 4096)
    assert own["mfu"] == pytest.approx(flops / 989e12) and own["share_of_peak"] == pytest.approx(flops / 8e14)
    # 16 layers, 4096 positions, 2048 channels, two products
    attention = 3 * 2 * 2 * 16 * 4096 * 2048 * own["tokens_per_second"]
    assert own["mfu_causal"] == pytest.approx((flops - attention / 2) / 989e12)
    assert from_dict(specs[2]["config"]).model.num_hidden_layers == 6 and layers["model"].startswith("6 layers")
    assert mixed["error"].endswith("OutOfMemoryError: CUDA out of memory") and "mfu" not in mixed
    assert [target["wanted"] for target in content["targets"]] == ["≥ 0.45", "≥ 1.15"] * 2
    assert content["targets"][1]["measured"] == pytest.approx(0.3 / 0.25) and content["targets"][1]["met"]
    assert content["targets"][0]["met"] is (own["mfu"] >= 0.45)


def test_the_page_says_what_the_files_say(tmp_path: Path) -> None:
    text = kernel_page.DOCUMENT.read_text()
    assert text.partition(kernel_page.BEGIN)[2].partition(kernel_page.END)[0] == kernel_page.section(), (
        "run python -m benchmarks.kernel_page"
    )
    assert kernel_page.section(tmp_path) == "Not measured yet: no GPU has run these kernels.\n"
    peers = {
        "torch eager": {"us": 250.0, "ratio": 2.5},
        "Liger": {"error": "none"},
        "cuDNN": {"us": 90.0, "ratio": 0.9},
    }
    target = {"target": "time / limit", "measured": 1.2, "wanted": "≤ 1.15", "met": False}
    measured = {"us": 100.0, "gbps": 900.0, "of_measured": 0.9, "peers": peers, "targets": [target], "error": None}
    rows = [
        {"group": "norm", "commit": "abc", "kernel": "norm", "shape": "8", **kernel_run.NOTHING, **measured},
        {"group": "swiglu", "kernel": "swiglu", "error": "no time | was left"},
    ]
    report.write("kernels", {"device": DEVICE, "results": rows, "targets": []}, tmp_path, None)
    assert kernel_page.section(tmp_path).splitlines()[-2:] == [
        "| norm, 8 | 100 | 900 | 90% | time / limit 1.2 (≤ 1.15: missed) | 2.50 | – | – | cuDNN 0.90 |",
        "| swiglu | not measured: no time / was left | | | | | | | |",
    ]
