"""Part 4: a small model on every layout of this machine's GPUs against one process: losses, gradient norms
and weights.

With one GPU two NCCL ranks share it, if they can: a probe tells. All layouts run one after the other in the
same processes; if one fails or hangs, the processes start again with the next. In the end a rank is killed,
and the others must name it. A rehearsal uses two gloo ranks.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict
from megalite.config.rules import check
from megalite.launch import local_ranks
from megalite.training.verify import single_process

RANK = "benchmarks.first_light.layout_rank"
MOST_RANKS = 8
STEPS = 4
STALL_S = 75.0  # until the next layout is done, a start included
SLOW_S = 150.0  # the same on processors that may be busy
PROBE_S = 60.0
KILL_S = 60.0
RESERVE_S = 5.0  # before the part's limit
EXACT, BF16 = (1e-5, 2e-5), (2e-2, 2e-2)
"""Relative tolerance of loss and norm, absolute tolerance of weights. A reduction in bf16 rounds every
gradient: the wide ones.

AdamW divides a gradient by its own size, so with eps = 1e-8 rounding alone moves the weights with the
smallest gradients by nearly the tolerance (1.7e-5 in fp32). eps = 1e-6 is above the rounding of these
gradients (3e-7), and far below most of them."""


@dataclass(frozen=True)
class LayoutCase:
    """A row of the table. options: changes of further sections."""

    name: str
    parallel: dict[str, Any]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: tuple[float, float] = EXACT
    precision: str = "fp32"


def layouts(world: int, on_gpu: bool) -> list[LayoutCase]:
    """Every layout of two ranks, or all divisions of more of them, and what data parallelism has besides."""
    dp = {"dp": world}
    cases = [
        *_divisions(world),
        LayoutCase(f"dp {world}, ZeRO-2, state in CPU memory", {**dp, "zero": 2, "offload": "cpu"}),
        LayoutCase(
            f"dp {world}, ZeRO-3, state and weights in CPU memory",
            {**dp, "zero": 3, "offload": "cpu", "offload_parameters": True},
        ),
        LayoutCase(
            f"dp {world}, ZeRO-1, gradients reduced in bf16",
            {**dp, "zero": 1, "reduce_dtype": "bf16"},
            tolerance=BF16,
        ),
        LayoutCase(
            f"dp {world}, ZeRO-2, saved in the background and resumed",
            {**dp, "zero": 2},
            {"checkpoint": {"async_save": True, "load": "none"}},
        ),
    ]
    if on_gpu:
        cases.append(
            LayoutCase(
                f"dp {world}, ZeRO-3, weights in CPU memory", {**dp, "zero": 3, "offload_parameters": True}
            )
        )
        cases += [
            LayoutCase(f"{each.name}, bf16", each.parallel, tolerance=BF16, precision="bf16")
            for each in cases
            if "sp" in each.name or "zb" in each.name
        ]
    return cases


def _divisions(world: int) -> Iterator[LayoutCase]:
    """tp × pp × dp = world, with each ZeRO stage for dp alone."""
    for tp in (size for size in range(1, world + 1) if world % size == 0):
        for pp in (size for size in range(1, world // tp + 1) if (world // tp) % size == 0):
            dp = world // tp // pp
            sizes = {"tp": tp, "pp": pp, "dp": dp, "sequence_parallel": tp > 1}
            name = " × ".join(
                f"{axis} {sizes[axis]}{' + sp' * (axis == 'tp')}"
                for axis in ("tp", "pp", "dp")
                if sizes[axis] > 1
            )
            zeros = (0, 1, 2, 3) if dp == world else (min(1, dp - 1),)
            yield from (
                LayoutCase(f"{name}, ZeRO-{zero}" if dp > 1 else name, {**sizes, "zero": zero})
                for zero in zeros
            )
            if pp > 1:
                yield LayoutCase(f"{name}, zb-v", {**sizes, "zero": min(1, dp - 1), "schedule": "zb-v"})


def rows(scene: Scene) -> Iterator[Row]:
    world = min(len(scene.gpus), MOST_RANKS) if len(scene.gpus) > 1 else 2
    with tempfile.TemporaryDirectory(prefix="megalite_first_light_") as scratch:
        place = RankMachine(scene, world, Path(scratch))
        if scene.gpus:
            yield (probed := place.probe())
            if probed["verdict"] != "measured":
                yield absent(
                    "layouts on NCCL",
                    "two NCCL ranks do not run on one GPU" if place.shared else "NCCL's probe failed",
                )
                return
        yield from place.compare(layouts(world, bool(scene.gpus)))
        yield guarded("a killed rank", "proof", place.kill_one)


@dataclass
class RankMachine:
    """The ranks of this machine, and a directory for their data and results."""

    scene: Scene
    world: int
    scratch: Path

    @property
    def shared(self) -> bool:
        return len(self.scene.gpus) == 1

    def start(
        self, name: str, ranks: int, spec: dict[str, Any], seconds: float, patience: float = 0.0
    ) -> tuple[Path, str]:
        """Run ranks in the directory `name`. Returns it with what went wrong, and what they printed; empty if
        nothing did."""
        directory = self.scratch / name
        directory.mkdir()
        spec = {"shared": self.shared and ranks > 1, "timeout": f"{KILL_S:.0f}s", **spec}
        (directory / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        ends, done = time.monotonic() + seconds, 0

        def look() -> None:
            nonlocal ends, done
            if (now := len(list(directory.glob("[0-9]*.json")))) > done:
                done, ends = now, time.monotonic() + seconds
            if time.monotonic() > min(ends, self.scene.ends - RESERVE_S):
                raise TimeoutError(
                    f"no progress for {seconds:.0f} s" if time.monotonic() > ends else "no time was left"
                )

        with open(directory / "output", "w+b") as output:
            command = ["-m", "megalite.launch.rank", RANK, str(directory)]
            try:
                status = local_ranks.run_ranks(
                    ranks, command, output=output, poll=look, patience=patience, variables=self._variables()
                )
                problem = f"a rank ended with status {status}" if status else ""
            except TimeoutError as error:
                problem = str(error)
            output.seek(0)
            said = output.read().decode(errors="replace").replace(f"{report.ROOT}/", "")
            said = re.sub(rf"\bhost {re.escape(os.uname().nodename)}\b", "host HOST", said)
        return directory, f"{problem}\n{said[-3000:]}" if problem else ""

    def _variables(self) -> dict[str, str]:
        return {"PYTHONPATH": report.search_path()} | (
            {} if self.scene.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        )

    def probe(self) -> Row:
        name = "two NCCL ranks on one GPU" if self.shared else f"NCCL on {self.world} GPUs"
        _, problem = self.start("probe", self.world, {"act": "probe"}, PROBE_S)
        first = problem.splitlines()[0] if problem else "a sum and messages arrive"
        return row(
            name,
            "missing" if problem and self.shared else "failed" if problem else "measured",
            first,
            output=problem,
        )

    # ---- against one process

    def config(self, layout: LayoutCase) -> dict[str, Any]:
        """The configuration of a layout."""
        length = self.scene.sized(128, 32)
        model = {
            "vocab_size": 512,
            "hidden_size": self.scene.sized(512, 64),
            "intermediate_size": self.scene.sized(1024, 96),
            "num_hidden_layers": 2 * self.world,
            "num_attention_heads": 8,
            "num_key_value_heads": 8 if self.world > 4 else 4,
            "max_position_embeddings": length,
        }
        data = report.write_random_tokens(self.scratch, 512, 64 * self.world * length, length // 3)
        return {
            "run": {"dir": str(self.scratch), "name": "layout"},
            "model": model,
            "parallel": {"tp": 1, "pp": 1, "dp": 1, "bucket_mb": 0.5, **layout.parallel},
            "data": {"train": data, "sequence_length": length, "reset_positions": True},
            "train": {
                "steps": 1000,
                "global_batch_size": 2 * self.world,
                "micro_batch_size": 1,
                "grad_clip": 1.0,
                "precision": layout.precision,
            },
            "optimizer": {"lr": 3e-4, "eps": 1e-6, "warmup_steps": 2},  # see EXACT
            "checkpoint": {"load": "none"},
        } | layout.options

    def compare(self, table: Sequence[LayoutCase]) -> Iterator[Row]:
        """A row for each layout."""
        legal: list[tuple[int, LayoutCase]] = []
        for number, layout in enumerate(table):
            if layout.options.get("checkpoint") and find_spec("google_crc32c") is None:
                yield absent(layout.name, "google-crc32c is not installed")
                continue
            try:
                check(from_dict(self.config(layout)), self.world, int(self.scene.device == "cuda"))
                legal.append((number, layout))
            except ConfigError as error:
                yield absent(layout.name, str(error).splitlines()[0])
        precisions = sorted({layout.precision for _, layout in legal})
        alone = [
            to_dict(single_process(from_dict(self.config(LayoutCase("", {}, precision=each)))))
            for each in precisions
        ]
        spec = {"act": "layouts", "steps": STEPS, "configs": list(enumerate(alone))}
        stall = SLOW_S if self.scene.rehearse else STALL_S
        reference, problem = self.start("alone", 1, spec, stall)
        if problem:
            yield row("one process", "failed", _last(problem), output=problem)
            return
        attempt = 0
        while legal:
            spec["configs"] = [(number, self.config(layout)) for number, layout in legal]
            directory, problem = self.start(f"ranks_{attempt}", self.world, spec, stall)
            attempt += 1
            for number, layout in [each for each in legal if (directory / f"{each[0]}.json").exists()]:
                against = reference / str(precisions.index(layout.precision))
                yield guarded(
                    layout.name, "proof", partial(compared, layout, directory / str(number), against)
                )
                legal.remove((number, layout))
            if legal and "no time was left" in problem:
                yield from (row(layout.name, "missing", "no time was left") for _, layout in legal)
                return
            if legal:
                _, layout = legal.pop(0)
                yield row(
                    layout.name,
                    "failed",
                    _last(problem) if problem else "no result was written",
                    output=problem,
                )

    # ---- a lost rank

    def kill_one(self) -> Row:
        """The others end by themselves, and name the rank that was killed."""
        layout = LayoutCase(
            "", {"dp": self.world, "zero": 2}, {"faults": {"inject": f"kill:rank={self.world - 1},step=3"}}
        )
        config = self.config(layout)
        config["run"]["timeout"] = f"{KILL_S:.0f}s"
        started = time.monotonic()
        _, problem = self.start(
            "killed",
            self.world,
            {"act": "fit", "config": config},
            KILL_S,
            patience=min(KILL_S, self.scene.left - RESERVE_S),
        )
        seconds = time.monotonic() - started
        named = re.search(rf"rank 0: .*?\((rank {self.world - 1} was lost first\b[^)]*)\)", problem)
        if named is None:
            late = self.scene.left <= RESERVE_S  # rank 0 had less time than it may take
            reason = (
                "no time was left" if late else f"rank 0 did not name it, {seconds:.0f} s after the start"
            )
            return row("a killed rank", "missing" if late else "failed", reason, output=problem)
        return row(
            "a killed rank", "passed", f"rank 0 ended by itself: {named[1]}", output=problem, seconds=seconds
        )


def _last(problem: str) -> str:
    """What went wrong, and the last line that was printed."""
    first, *said = problem.strip().splitlines()
    return f"{first}: {said[-1].strip()[:200]}" if said else first


def compared(layout: LayoutCase, directory: Path, reference: Path) -> Row:
    """Compare what rank 0 wrote with what one process wrote: each step's loss and norm, and the weights at
    the end."""
    got, expected = (
        json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) for path in (directory, reference)
    )
    relative, absolute = layout.tolerance
    worst = 0.0
    for step, (own, alone) in enumerate(zip(got["scalars"], expected["scalars"], strict=True), start=1):
        for name in ("loss", "grad_norm"):
            error = abs(own[name] - alone[name]) / max(abs(alone[name]), 1e-30)
            worst = max(worst, error)
            if not error <= relative:
                return row(
                    layout.name,
                    "failed",
                    f"step {step}: {name} is {own[name]:.8g}, with one process {alone[name]:.8g}",
                    **got,
                )
    weights, others = (np.load(path.with_suffix(".npz")) for path in (directory, reference))
    if set(weights) != set(others):
        return row(layout.name, "failed", f"other weights: {sorted(set(weights) ^ set(others))[:3]}")
    errors = {name: float(np.abs(weights[name] - others[name]).max()) for name in weights}
    most = max(errors, key=errors.__getitem__)
    if not all(error <= absolute for error in errors.values()):
        return row(
            layout.name, "failed", f"{most} differs by {errors[most]:.3g} after {STEPS} steps", errors=errors
        )
    said = f"{STEPS} steps; loss and norm within {worst:.1e}, weights within {errors[most]:.1e}"
    return row(layout.name, "passed", said, seconds=got["seconds"], scalars=got["scalars"])
