"""Part 4: a small model on all layouts of this machine's GPUs, compared with one process.

Losses, gradient norms and weights are compared. With a single GPU two NCCL ranks share it, if a probe shows
that they can. All layouts run one after the other in the same processes; if one fails or hangs, the processes
are started again with the next one. At the end a rank is killed, and the others must identify it. A rehearsal
uses two gloo ranks.
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
"""Relative tolerance of loss and norm, and absolute tolerance of weights.

The second pair is for reductions in bf16, which round every gradient. AdamW divides a gradient by its own
magnitude, so that with eps = 1e-8 rounding alone changes the weights with the smallest gradients by nearly
the tolerance (1.7e-5 in fp32). eps = 1e-6 is above the rounding of these gradients (3e-7), and far below most
of them.
"""


@dataclass(frozen=True)
class LayoutCase:
    """A row of the table.

    Attributes:
        options: changes of other sections.
    """

    name: str
    parallel: dict[str, Any]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: tuple[float, float] = EXACT
    precision: str = "fp32"


def layouts(world: int, on_gpu: bool) -> list[LayoutCase]:
    """Return all layouts of two ranks, or all divisions of more ranks.

    Further options of data parallelism are included.
    """
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
    """Yield tp × pp × dp = world, with each ZeRO stage if only dp is used."""
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
                    "two NCCL ranks could not share one GPU" if place.shared else "the NCCL probe failed",
                )
                return
        yield from place.compare(layouts(world, bool(scene.gpus)))
        yield guarded("a killed rank", "proof", place.kill_one)


@dataclass
class RankMachine:
    """Ranks on this machine, with a directory for their data and results."""

    scene: Scene
    world: int
    scratch: Path

    @property
    def shared(self) -> bool:
        return len(self.scene.gpus) == 1

    def start(
        self, name: str, ranks: int, spec: dict[str, Any], seconds: float, patience: float = 0.0
    ) -> tuple[Path, str]:
        """Run ranks in the directory `name`.

        Returns:
            the directory, and the error with the output, which is empty on success.
        """
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
                    f"no progress for {seconds:.0f} s" if time.monotonic() > ends else "out of time"
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
        """Return the configuration of a layout."""
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
        """Yield a row for each layout."""
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
            yield row("one process", "failed", last_line(problem), output=problem)
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
            if legal and "out of time" in problem:
                yield from (row(layout.name, "missing", "out of time") for _, layout in legal)
                return
            if legal:
                _, layout = legal.pop(0)
                yield row(
                    layout.name,
                    "failed",
                    last_line(problem) if problem else "no result was written",
                    output=problem,
                )

    # ---- a lost rank

    def kill_one(self) -> Row:
        """Check that the other ranks exit on their own and identify the rank that was killed."""
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
                "out of time"
                if late
                else f"rank 0 did not report the lost rank within {seconds:.0f} s of the start"
            )
            return row("a killed rank", "missing" if late else "failed", reason, output=problem)
        return row(
            "a killed rank",
            "passed",
            f"rank 0 exited on its own: {named[1]}",
            output=problem,
            seconds=seconds,
        )


def last_line(problem: str) -> str:
    """Return the error and the last line that was printed."""
    first, *said = problem.strip().splitlines()
    return f"{first}: {said[-1].strip()[:200]}" if said else first


def compared(layout: LayoutCase, directory: Path, reference: Path, where: str = "on one process") -> Row:
    """Compare the results of rank 0 with a reference: losses, norms and the final weights.

    Args:
        where: how the reference was computed.
    """
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
                    f"step {step}: {name} is {own[name]:.8g}, but {alone[name]:.8g} {where}",
                    **got,
                )
    weights, others = (np.load(path.with_suffix(".npz")) for path in (directory, reference))
    if set(weights) != set(others):
        return row(layout.name, "failed", f"other weights: {sorted(set(weights) ^ set(others))[:3]}")
    errors = {name: float(np.abs(weights[name] - others[name]).max()) for name in weights}
    most = max(errors, key=errors.__getitem__)
    steps = len(got["scalars"])
    if not all(error <= absolute for error in errors.values()):
        return row(
            layout.name, "failed", f"{most} differs by {errors[most]:.3g} after {steps} steps", errors=errors
        )
    said = f"{steps} steps; loss and norm within {worst:.1e}, weights within {errors[most]:.1e}"
    return row(layout.name, "passed", said, seconds=got["seconds"], scalars=got["scalars"])
