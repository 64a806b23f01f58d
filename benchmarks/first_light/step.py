"""Part 3: a training step of some layers of Llama 3 8B.

It is measured with and without documents, and with several GPUs on simple layouts. Each case is a separate
process and reports MFU, peak memory compared with the planner, the most expensive kernels, and the idle time
of the device. The routes of attention and of the weight gradient's matmul follow (`routes.py`). If they
change the route of documents, that step is measured again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import gpu_step, report
from benchmarks.first_light import routes
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from megalite.config.load import from_dict
from megalite.planner.api import estimate, find_device_by_driver_name, step_seconds

LONGEST_S = 90.0
ROUTES_S = 45.0  # left for the routes
LAYERS = {75: 6, 38: 2, 0: 1}  # of 8B: GiB of the device → layers that fit with embedding, head and optimizer
DOCUMENT = 2048


@dataclass(frozen=True)
class StepCase:
    """A step.

    Attributes:
        parallel: sizes of the layout.
        document: tokens of each document.
    """

    name: str
    parallel: dict[str, int]
    document: int | None = None

    @property
    def ranks(self) -> int:
        return self.parallel.get("tp", 1) * self.parallel.get("dp", 1)


def rows(scene: Scene) -> Iterator[Row]:
    documents = StepCase("a step with documents", {}, 4 if scene.rehearse else DOCUMENT)
    with TemporaryDirectory(prefix="megalite_first_light_") as scratch:
        for case in (StepCase("a step", {}), documents, *_of_several(len(scene.gpus))):
            yield from measured(case, scene, Path(scratch))
        before = routes.table_of(scene)
        yield from routes.rows(scene)
        after = routes.table_of(scene)
        if before.get("attention") != after.get("attention"):
            yield from measured(
                replace(documents, name="a step with documents, by the fastest routes"), scene, Path(scratch)
            )


def _of_several(gpus: int) -> list[StepCase]:
    if gpus < 2:
        return []
    return [
        StepCase(f"a step with tp {gpus}", {"tp": gpus}),
        StepCase(f"a step with dp {gpus}, ZeRO-2", {"dp": gpus, "zero": 2}),
    ]


def measured(case: StepCase, scene: Scene, scratch: Path) -> Iterator[Row]:
    """Yield the row of the step, and one for its kernels."""
    results: dict[str, Any] = {}
    yield guarded(case.name, "measurement", partial(_measured, case, scene, scratch, results))
    if profile := results.get("profile"):
        yield _kernels(case, profile)


def _measured(case: StepCase, scene: Scene, scratch: Path, results: dict[str, Any]) -> Row:
    limit = min(LONGEST_S, scene.left - ROUTES_S)
    if limit < 15.0:
        raise TimeoutError("out of time")
    config = configuration(case, scene, scratch)
    spec = {"config": config, "device": scene.device, "matmul": None, "profile": True, "product_steps": 0}
    spec |= {
        "warmup_steps": scene.sized(3, 1),
        "steps": scene.sized(6, 2),
        "peak_size": scene.sized(8192, 128),
    }
    threads = 1 if scene.rehearse else max(1, report.cores() // case.ranks)
    results |= report.launch("benchmarks.trainer_run", spec, ranks=case.ranks, threads=threads, limit_s=limit)
    figures = gpu_step.figures(config, results)
    return row(
        case.name,
        "measured",
        _in_words(figures | _memory(config, results, scene), results),
        **_figures(config, figures, results, scene),
    )


def configuration(case: StepCase, scene: Scene, scratch: Path) -> dict[str, Any]:
    shape = gpu_step.SHAPES[1]
    if scene.gpus:
        import torch

        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        shape = replace(shape, layers=next(layers for least, layers in LAYERS.items() if gib >= least))
    config = shape.config(scratch, scene.rehearse, case.document)
    replicas = case.parallel.get("dp", 1)
    config["parallel"] |= case.parallel | {"sequence_parallel": "tp" in case.parallel}
    config["train"] |= {
        "global_batch_size": shape.batch * replicas,
        "precision": "fp32" if scene.rehearse else "bf16",
    }
    return config


def _memory(config: dict[str, Any], results: dict[str, Any], scene: Scene) -> dict[str, float | None]:
    """Return the peak of allocated memory, and the planned peak of the rank that needs the most, in GiB."""
    parsed = from_dict(config)
    world = parsed.parallel.tp * (parsed.parallel.dp or 1)
    predicted = max(rank.total for rank in estimate(parsed, world, scene.device))
    peak = results["peak_allocated"] or results["peak_rss_above_import"]
    return {"peak_gib": peak / 2**30 if peak else None, "predicted_gib": predicted / 2**30}


def _figures(
    config: dict[str, Any], figures: dict[str, Any], results: dict[str, Any], scene: Scene
) -> dict[str, Any]:
    device = find_device_by_driver_name(results["device"]) if results["device"] else None
    seconds = step_seconds(from_dict(config), device) if device else None
    profile = results.get("profile") or {}
    return {
        **figures,
        **_memory(config, results, scene),
        "seconds": median(results["seconds"]),
        "predicted_seconds": seconds,
        "idle": profile.get("idle"),
        "config": {name: value for name, value in config.items() if name not in ("run", "data")},
        "sequence_length": config["data"]["sequence_length"],
        "documents": config["data"]["reset_positions"],
    }


def _in_words(figures: dict[str, Any], results: dict[str, Any]) -> str:
    said = [f"{figures['ms_per_step']:,.1f} ms, {figures['tokens_per_second']:,.0f} tokens/s"]
    if figures["mfu"] is not None:
        said.append(f"MFU {figures['mfu']:.1%} (causal {figures['mfu_causal']:.1%})")
    if figures["peak_gib"] is not None:
        said.append(f"peak {figures['peak_gib']:,.2f} GiB, predicted {figures['predicted_gib']:,.2f}")
    idle = (results.get("profile") or {}).get("idle")
    return ", ".join([*said, *([f"idle {idle:.1%}"] if idle is not None else [])])


def _kernels(case: StepCase, profile: dict[str, Any]) -> Row:
    name = f"kernels of {case.name}"
    if not profile["kernels"]:
        return absent(name, "the profiler recorded no kernels, which requires permission to use CUPTI")
    top = "; ".join(
        f"{each['name'][:60]} {each['us'] / 1e3:,.2f} ms ({each['share']:.0%})"
        for each in profile["kernels"][:5]
    )
    return row(name, "measured", top, **profile)
