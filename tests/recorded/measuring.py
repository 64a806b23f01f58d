"""Trains the runs by a tree's pretrain.py, and reads what they leave: numbers of each step, bits of each tensor."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.recorded.runs import SAVED, STEPS, Run

TIMEOUT = 600.0  # seconds, for one run
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "loss_scale", "skipped", "val_loss")
STATE = ("step", "samples", "skipped", "loss_scale", "fingerprint")
WORDS = (
    "model",
    "learns",
    "from",
    "text",
    "what",
    "comes",
    "next",
    "and",
    "how",
    "often",
    "it",
    "has",
    "come",
    "before",
    "in",
    "such",
    "a",
)


class Recorder:
    """One tree, and the directory in which its runs are made."""

    def __init__(self, tree: Path, directory: Path):
        self.tree, self.directory = tree.resolve(), directory.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        paths = f"{self.tree}{os.pathsep}{self.tree / 'kernels'}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "CUDA_VISIBLE_DEVICES": "",
        }
        files = self._run(
            "check", ["-c", "import megalite, megalite_kernels as kernels; print(megalite.__file__, kernels.__file__)"]
        )
        if not all(Path(file).is_relative_to(self.tree) for file in files.split()):
            raise SystemExit(f"the interpreter takes other sources than those of {self.tree}: {files}")

    def prepare(self) -> dict[str, str]:
        """Make the token files with the tree's own tool; returns the hash of each."""
        write_inputs(self.directory)
        tool = str(self.tree / "tools" / "prepare_data.py")
        for name, options in {"text": (), "more": (), "chat": ("--chat", "--max_length", "65")}.items():
            # of an earlier recording; not every tree's tool has --overwrite
            (self.directory / f"{name}.idx").unlink(missing_ok=True)
            arguments = [
                "--input",
                f"{name}.jsonl",
                "--tokenizer",
                "byte",
                "--output",
                name,
                "--workers",
                "1",
                *options,
            ]
            self._run(f"prepare {name}", [tool, *arguments])
        files = sorted(path for kind in ("bin", "idx") for path in self.directory.glob(f"*.{kind}"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def record(self, runs: list[Run], at_once: int, checkpoints: Path | None = None) -> dict[str, Any]:
        """Train each of the runs, or with `checkpoints`, what is left of them after the checkpoint that another
        recording has there."""

        def one(run: Run) -> dict[str, Any]:
            result = self.train(
                run, None if checkpoints is None else checkpoints / run.name / "checkpoints" / f"step_{SAVED:08}"
            )
            print(f"{run.name}: {len(result['steps'])} lines, {len(result['tensors'])} tensors", flush=True)
            return result

        with ThreadPoolExecutor(at_once) as pool:
            return dict(zip([run.name for run in runs], pool.map(one, runs), strict=True))

    def train(self, run: Run, checkpoint: Path | None) -> dict[str, Any]:
        config = run.config()
        # else the tree computes with oneDNN anyhow
        options = "".join(path.read_text() for path in (self.tree / "megalite" / "config").rglob("*.py"))
        # the present name, then the one that earlier trees have
        if name := next((name for name in ("fp32_matmul", "fp32_products") if name in options), None):
            config["train"][name] = "onednn"
        if checkpoint is not None:
            config["checkpoint"]["load"] = str(checkpoint.resolve())
            config["run"]["dir"] = "resumed"
        file = self.directory / f"{config['run']['dir']} {run.name}.yaml"
        file.write_text(yaml.safe_dump(config))
        launcher = (
            []
            if run.ranks == 1
            else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
        )
        self._run(file.stem, [*launcher, str(self.tree / "pretrain.py"), "--config", str(file)])
        left = self.directory / config["run"]["dir"] / run.name
        lines = [json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()]
        steps = [{key: line[key] for key in NUMBERS if key in line} for line in lines]
        return {"steps": steps, **tensors_of(left / "checkpoints" / f"step_{STEPS:08}")}

    def _run(self, what: str, arguments: list[str]) -> str:
        """Run Python to its end; what it prints. Ends the recording where that fails."""
        command, log = [sys.executable, *arguments], self.directory / f"{what}.log"
        with open(log, "w") as file:
            ended = subprocess.run(
                command, cwd=self.directory, env=self.environment, stdout=file, stderr=file, timeout=TIMEOUT
            )
        text = log.read_text()
        if ended.returncode:
            raise SystemExit(f"{what} failed with exit status {ended.returncode}:\n{text[-4000:]}")
        return text


def write_inputs(directory: Path) -> None:
    """Texts and conversations of different lengths, the same each time."""
    chance = random.Random(7)

    def text(longest: int) -> str:
        return " ".join(
            WORDS[int(len(WORDS) * chance.random() ** 2)] for _ in range(1 + int(longest * chance.random()))
        )

    texts, more = ([{"text": text(60)} for _ in range(count)] for count in (150, 50))
    chats = [
        {
            "messages": [
                {"role": role, "content": text(4)} for _ in range(1 + number % 2) for role in ("user", "assistant")
            ]
        }
        for number in range(300)
    ]
    for name, records in (("text", texts), ("more", more), ("chat", chats)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint of format 1 and the hash of each of its tensors, whatever ranks have written which
    part."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["format"] == 1, manifest["format"]
    hashes = {}
    for name, tensor in sorted(manifest["tensors"].items()):
        kind, shape, chunks = tensor["dtype"], tensor["shape"], [chunk for chunk in tensor["chunks"] if chunk["bytes"]]
        width = chunks[0]["bytes"] // prod(chunks[0]["sizes"]) if chunks else 1
        whole, written = np.zeros(shape, f"V{width}"), 0
        for chunk in chunks:
            with open(checkpoint / chunk["file"], "rb") as file:
                file.seek(chunk["offset"])
                part = np.frombuffer(file.read(chunk["bytes"]), whole.dtype).reshape(chunk["sizes"])
            whole[
                tuple(slice(start, start + size) for start, size in zip(chunk["offsets"], chunk["sizes"], strict=True))
            ] = part
            written += part.size
        assert written == prod(shape), f"{checkpoint}: {name} has {prod(shape)} elements, of which {written} are stored"
        hashes[name] = f"{kind} {shape} {hashlib.sha256(whole.tobytes()).hexdigest()}"
    return {"state": {key: manifest["state"][key] for key in STATE}, "tensors": hashes}
