"""Train a small model on this machine in a few minutes; `make demo` runs it.

    megalite demo

1. The source of the running interpreter's standard library is the corpus; a 4,096-piece tokenizer is trained
   on it.
2. configs/quickstart.yaml trains on eight ranks, TP2 × PP2 × DP2: on GPUs if there is one for every rank,
   else on the CPU.
3. Losses are printed and plotted, and the trained model continues a line of Python.

All files are in runs/demo/. Completed steps are not repeated: remove runs/demo/ to start over.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

from megalite.commands.parser import Parser
from megalite.config import run_files
from megalite.launch.signals import Interrupt
from megalite.system.processes import marked

CONFIG = Path("configs/quickstart.yaml")
TOKENS = Path("runs/demo/data/stdlib")
RUN = Path("runs/demo/quickstart")
VOCABULARY = 4096
# others' code, tests, tables
NO_SOURCE = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
PROMPT = "def read_config(path):\n"


class DemoLayout(NamedTuple):
    """The sizes of a layout, and why it was chosen."""

    tp: int
    pp: int
    dp: int
    why: str

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


def main() -> None:
    tool = Parser(description=__doc__)
    tool.parse_args()
    os.chdir(tool.enter_checkout())
    started = time.monotonic()
    try:
        prepare()
        train(choose_layout(gpu_count()))
        show_losses()
        show_sample()
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"{tool.prog}: command failed with exit status {error.returncode}: "
            f"{shlex.join(map(str, error.cmd))}"
        )
    print(
        f"\n{time.monotonic() - started:.0f} s. The run is in {RUN}/. Use megalite generate to "
        "continue other texts with the model."
    )


# ---- data


def prepare() -> None:
    """Write the token file, unless it exists from an earlier demo."""
    heading("Data: the source of the Python standard library")
    if all(Path(f"{TOKENS}{suffix}").exists() for suffix in (".bin", ".idx", ".json")):
        print(f"{TOKENS} already exists")
        return
    TOKENS.parent.mkdir(parents=True, exist_ok=True)
    library = sysconfig.get_paths()["stdlib"]
    exclude = [f"*/{name}/*" for name in NO_SOURCE]
    options = [
        "--input",
        f"{library}/**/*.py",
        "--exclude",
        *exclude,
        "--train_tokenizer",
        str(VOCABULARY),
        "--output",
        str(TOKENS),
    ]
    run("prepare", *options)


# ---- training


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_layout(gpus: int) -> DemoLayout:
    """Choose the largest layout with one rank per GPU.

    With fewer than two GPUs, use eight ranks on the CPU.
    """
    if gpus >= 8:
        return DemoLayout(2, 2, 2, f"{gpus} GPUs: NCCL")
    if gpus >= 4:
        return DemoLayout(2, 2, 1, f"{gpus} GPUs, not enough for eight ranks: four ranks, NCCL")
    if gpus >= 2:
        return DemoLayout(2, 1, 1, f"{gpus} GPUs, not enough for eight ranks: two ranks, NCCL")
    if gpus == 1:
        return DemoLayout(2, 2, 2, "1 GPU, but NCCL needs one per rank: eight ranks on the CPU, gloo")
    return DemoLayout(2, 2, 2, "no GPU: eight ranks on the CPU, gloo")


def train(layout: DemoLayout) -> None:
    """Train, or resume an interrupted run. A finished run returns at once."""
    heading(f"Training: TP{layout.tp} × PP{layout.pp} × DP{layout.dp} ({layout.why})")
    sizes = ["--tp", str(layout.tp), "--pp", str(layout.pp), "--dp", str(layout.dp)]
    run("train", "--nproc", str(layout.ranks), "--config", str(CONFIG), *sizes)


# ---- results


def show_losses() -> None:
    """Print the losses at each validation, and plot all of them."""
    heading("Losses")
    training, validation = read_losses(RUN / run_files.METRICS)
    print("  step   training   validation")
    for step, loss in validation.items():
        print(f"{step:6d} {training[step]:10.4f} {loss:12.4f}")
    draw_losses(training, validation, RUN / "loss.png")
    print(f"The loss curve is {RUN / 'loss.png'}")


def read_losses(metrics: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the training and validation losses by step from a metrics.jsonl."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    training = {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}
    return training, {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}


def draw_losses(training: dict[int, float], validation: dict[int, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(list(training), list(training.values()), linewidth=1, label="training")
    axes.plot(list(validation), list(validation.values()), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=CONFIG.stem)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def show_sample() -> None:
    heading("Sample from the model")
    print(PROMPT, end="", flush=True)
    run("generate", str(RUN), "--prompt", PROMPT, "--tokens", "100", quiet=True)


# ---- helpers


def heading(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def run(*words: str, quiet: bool = False) -> None:
    """Print and run a megalite command. Raises CalledProcessError if it fails."""
    if not quiet:
        print(f"$ megalite {shlex.join(words)}", flush=True)
    child = subprocess.Popen([sys.executable, "-m", "megalite", *words], env={**os.environ, **marked()})
    try:
        status = child.wait()
    except Interrupt as interrupt:  # training saves; the same Ctrl-C from the terminal does not count twice
        child.send_signal(interrupt.number)
        child.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, ["megalite", *words])
