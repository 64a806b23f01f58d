"""What the watchdog thinks of a rank on a GPU whose host works for long: the table of docs/faults.md."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.assembly import parts as build
from megalite.checkpoint import api, tensors
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.saver import Saver
from megalite.config.load import from_dict
from megalite.data.loader import Loader
from megalite.monitoring.observers import Observer
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.averaging import WeightAverage
from megalite.parallel.sharding.bucket_buffers import BucketBuffers
from megalite.training.fit import fit
from megalite.training.trainer import Trainer
from megalite.training.watchdog import Watchdog
from megalite.training.weight_update import WeightUpdater
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {
    **SINGLE,
    "tied": False,
    "kv_heads": 2,
    "vocab_size": 96,
    "layers": 1,
    "masked": False,
    "dropout": 0.0,
    "microbatches": 1,
}
ALONE = {
    "drawing weights",
    "reserving memory for saves",
    "reading a checkpoint",
    "reading a batch",
    "writing a save",
    "syncing a save to disk",
    "publishing a save",
    "removing old saves",
    "awaiting a save in the background",
    "an instrument before a step",
    "an instrument after a step",
    "figures of a step",
    "an instrument at the end",
    "the average's weights",
    "compiling a kernel in F0.0",
    "compiling a region in B0.0",
}
"""Work of the host: it is not ended, however long it takes."""
WAITS = {"F0.0", "B0.0", "reduction", "norm and update", "an update on the device", "a message that does not come"}
"""There the host of a GPU may wait for the device, and the device for a rank that does not do its part: it is ended by
name."""


class Alive:
    """Every other rank answers, and none moves."""

    def look(self) -> None:
        pass

    def origin(self, peer: int | None) -> None:
        pass


class Probe:
    """Asks at any moment whether the watchdog would end this rank, had nothing changed for hours: the answers by the
    moment's name."""

    def __init__(self, dog: Watchdog, monkeypatch: pytest.MonkeyPatch):
        self.dog, self.monkeypatch, self.endings = dog, monkeypatch, defaultdict[str, set[bool]](set)
        monkeypatch.setattr(dog, "_end", lambda verdict, what: self.ended.append(what))

    def __call__(self, moment: str) -> None:
        self.ended: list[str] = []
        self.dog._look(Alive(), stood=1e9)  # type: ignore[arg-type]
        self.endings[moment].add(bool(self.ended))

    def at(self, owner: Any, name: str, moment: str) -> None:
        """Ask whenever a function is called."""
        original = getattr(owner, name)

        def asking(*args: Any, **options: Any) -> Any:
            self(moment)
            return original(*args, **options)

        self.monkeypatch.setattr(owner, name, asking)


class Instrument(Observer):
    def __init__(self, probe: Probe):
        self.probe = probe

    def before(self, step: int) -> None:
        self.probe("an instrument before a step")

    def after(self, step: int) -> None:
        self.probe("an instrument after a step")

    def numbers(self, metrics: Any) -> dict[str, Any]:
        self.probe("figures of a step")
        return {}

    def finish(self) -> list[str]:
        self.probe("an instrument at the end")
        return []


def inside(module: str, action: Callable[[], None]) -> None:
    """Call a function from a frame of a module."""
    exec("action()", {"__name__": module, "action": action})


def watched(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, offloaded: bool = False) -> dict[str, set[bool]]:
    """A run that starts, trains, validates, saves and goes back, with the answers to the questions of all of it."""
    run_config = from_dict(config)
    mesh = build.make_mesh(run_config)
    probe = Probe(Watchdog(run_config, mesh, run_config.run.directory), monkeypatch)
    monkeypatch.setattr(WeightUpdater, "_offloaded", offloaded)
    for owner, name, moment in (
        (BucketBuffers, "write", "drawing weights"),
        (Saver, "reserve", "reserving memory for saves"),
        (Manifest, "read", "reading a checkpoint"),
        (Loader, "step", "reading a batch"),
        (tensors, "append_chunk", "writing a save"),
        (os, "fsync", "syncing a save to disk"),
        (api.directories, "publish", "publishing a save"),
        (api.directories, "prune", "removing old saves"),
        (Saver, "wait", "awaiting a save in the background"),
        (AdamW, "step", "an update on the device"),
        (WeightAverage, "in_use", "the average's weights"),
    ):
        probe.at(owner, name, moment)

    def begins(place: Any) -> None:
        if str(place) in WAITS:
            probe(str(place))
        if str(place) == "F0.0":
            inside("triton.compiler.compiler", lambda: probe("compiling a kernel in F0.0"))
        if str(place) == "B0.0":
            inside("torch._dynamo.convert_frame", lambda: probe("compiling a region in B0.0"))

    mesh.activity.listeners += (begins,)
    trainer = Trainer(run_config, mesh)
    try:
        fit(trainer, [Instrument(probe)])
    finally:
        gc.unfreeze()
        gc.enable()
        trainer.close()
    mesh.activity.wait_for("pipeline message RF0.0<3", 3)
    probe("a message that does not come")
    return dict(probe.endings)


def test_work_of_the_host_is_not_ended_and_waits_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    config = config_of(CASE, write_tokens(tmp_path, 96), run={"dir": str(tmp_path), "name": "run"})
    config["train"] |= {"steps": 4, "watchdog": None, "ema_decay": 0.9}
    config |= {"checkpoint": {"interval": 1, "keep": 1}, "validation": {"interval": 2, "batches": 2, "ema": True}}
    config["data"]["validation"] = 0.2
    config["faults"] = {"inject": "nan:step=3", "skip_limit": 1, "rollback": True}
    with monkeypatch.context() as patch:
        assert watched(config, patch) == {moment: {moment in WAITS} for moment in ALONE | WAITS}
    config["run"]["name"] = "offloaded"
    with monkeypatch.context() as patch:
        endings = watched(config, patch, offloaded=True)
    assert endings["an update on the device"] == {False}, "it is one on the host"
