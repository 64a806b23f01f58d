"""Part 8: predictions of the planner for all steps of part 3, compared with the measurements.

They are based on the device in the table and on a calibration. The calibration measures matmuls, bandwidth,
attention, loss, links and the cost of a call, but no training step. With --calibrate it is written as a
device file for `megalite plan --gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import plan
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.planner.api import Device, read_device, step_seconds

RESERVE_S = 5.0


def rows(scene: Scene) -> Iterator[Row]:
    measurements: dict[str, Any] = {}
    yield guarded("calibration", "measurement", partial(_calibrated, scene, measurements))
    steps = [step for step in scene.earlier.get("step", ()) if "config" in step]
    if not steps:
        yield absent("predicted steps", "the step measurements are missing")
    device = read_device("calibrated", measurements) if measurements else None
    for step in steps:
        yield guarded(f"{step['name']}: time", "measurement", partial(_step, step, device))
        if step["peak_gib"]:
            ratio = step["predicted_gib"] / step["peak_gib"]
            detail = (
                f"measured {step['peak_gib']:,.3g} GiB, predicted {step['predicted_gib']:,.3g} (× "
                f"{ratio:.2f})"
            )
            yield row(f"{step['name']}: memory", "measured", detail, ratio=ratio)


def _calibrated(scene: Scene, measurements: dict[str, Any]) -> Row:
    measurements |= plan.calibrate(smoke=scene.rehearse, limit_s=scene.left - RESERVE_S)
    forward, backward = measurements["attention_gflops"]
    said = [
        f"{measurements['sustained']:.0%} of the peak"
        if scene.gpus
        else f"{measurements['tflops']['fp32'] * 1e3:,.0f} GFLOP/s in fp32",
        f"memory {measurements['memory_gbs']:,.0f} GB/s",
        f"attention {forward / 1e3:,.1f} and {backward / 1e3:,.1f} TFLOP/s",
        f"link {measurements['within']['gbs']:,.2f} GB/s",
    ]
    if scene.calibrate:
        plan.write_device(Path(scene.calibrate), measurements)
        said.append("wrote the device file")
    return row("calibration", "measured", ", ".join(said), device=measurements)


def configuration(step: Row) -> Config:
    """Return the configuration of a measured step, without its data."""
    return from_dict({**step["config"], "data": {"sequence_length": step["sequence_length"]}})


def _step(step: Row, device: Device | None) -> Row:
    """Compare measured and predicted seconds.

    Documents are not included in the prediction: attention is counted for whole rows.
    """
    measured = step["seconds"]
    predictions = {
        "calibration": step_seconds(configuration(step), device) if device else None,
        "table": step["predicted_seconds"],
    }
    ratios = {name: seconds / measured for name, seconds in predictions.items() if seconds is not None}
    said = [
        f"{1e3 * (predictions[name] or 0):,.1f} ms by the {name} (× {ratio:.2f})"
        for name, ratio in ratios.items()
    ]
    detail = (
        f"measured {1e3 * measured:,.1f} ms, predicted "
        f"{', '.join(said) or 'nothing, because the device is unknown'}"
    )
    whole = "; documents are not included in the prediction" if step["documents"] else ""
    return row(
        f"{step['name']}: time",
        "measured",
        detail + whole,
        measured=measured,
        predicted=predictions,
        ratios=ratios,
    )
