"""The wheel contains all of megalite and works without a checkout: commands, shipped configurations and ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import megalite
from tests.structure.sources import ROOT

Run = Callable[..., str]
MODEL = "--model.hidden_size 32 --model.intermediate_size 64 --model.num_hidden_layers 2 --data.sequence_length 16"
STEPS = "--train.global_batch_size 4 --train.micro_batch_size 2 --train.steps 2 --optimizer.warmup_steps 1"


def files_under(directory: str, endings: str, base: Path) -> set[str]:
    """The files of a directory of the project with certain endings, relative to `base`."""
    files = [path for ending in endings.split() for path in (ROOT / directory).rglob(f"*.{ending}")]
    return {str(path.relative_to(base)) for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip install` builds it, from a copy, because a build leaves files in its tree."""
    place = tmp_path_factory.mktemp("wheel")
    tree = place / "tree"
    for name in ("megalite", "kernels", "configs", "tests/structure", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "pretrain.py"):
        shutil.copy(ROOT / name, tree / name)
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(place)], cwd=tree, check=True, capture_output=True)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(*words, status=0) → output of the installed `megalite`, under torchrun if `ranks` is given.

    All runs share a directory. The environment has the wheel and the packages of this one, without the checkout:
    Python reads no .pth files, such as the one of an editable install, in directories that a .pth file lists.
    """
    place = tmp_path_factory.mktemp("installed")
    venv.create(place / "venv", symlinks=True)
    (packages,) = (place / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    python = place / "venv" / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--ignore-installed", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", f"--python={python}", *install], check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    (place / "work").mkdir()

    def call(*words: str, ranks: int = 0, status: int = 0) -> str:
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} -m megalite"
        program = [str(python), *torchrun.split()] if ranks else [str(python.with_name("megalite"))]
        command = [*program, *words]
        done = subprocess.run(command, cwd=place / "work", env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stderr[-4000:]
        return done.stdout if status == 0 else done.stderr

    return call


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path):
    assert wheel.name.startswith(f"megalite-{megalite.__version__}-py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    megalite_files = files_under("megalite", "py yaml jinja js", ROOT)
    megalite_files |= {f"megalite/monitoring/report/uplot/{name}" for name in ("LICENSE", "uPlot.min.css")}
    megalite_files |= {f"megalite/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert names == megalite_files | files_under("kernels", "py yaml json", ROOT / "kernels")


def test_an_installed_megalite_prepares_trains_exports_and_generates(run: Run, tmp_path: Path):
    (tmp_path / "text.txt").write_text("a shipped configuration trains without a checkout\n" * 400)
    run("prepare", "--input", str(tmp_path / "text.txt"), "--tokenizer", "byte", "--output", "tokens", "--workers", "2")
    output = run(
        "train",
        "--config",
        "quickstart",
        "--data.train",
        "tokens",
        "--tp",
        "2",
        *MODEL.split(),
        *STEPS.split(),
        ranks=2,
    )
    assert "gloo on cpu" in output
    trained = "runs/demo/quickstart"
    run("convert", "export", trained, "exported")
    text = run("generate", trained, "--prompt", "a ship", "--tokens", "3", "--json", "--tp", "2")
    assert len(json.loads(text)["tokens"]) == 3


def test_an_installed_megalite_plans(run: Run):
    sizes = "--gpus 8 --gpu h100 --sequence_length 2048 --global_batch_size 64 --tp 2 --pp 2"
    run("plan", "--model", "llama-3-8b", *sizes.split(), "--write", "plan.yaml")
    bubble = run("bubble", "--pp", "2", "--microbatches", "4", "--schedule", "1f1b", "--json")
    assert json.loads(bubble)["makespan"] == 15
    listed = [line.split()[0] for line in run("train", "--list_configs").splitlines()]
    assert listed == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def test_an_installed_megalite_names_no_file_of_a_checkout(run: Run):
    """In its messages: how to prepare data, options, and the commands that need the source."""
    missing = run("train", "--config", "shakespeare-char", status=2)
    assert "megalite prepare --output data/shakespeare" in missing
    helps = [run(name, "--help") for name in ("train", "plan", "convert")]
    needs = [run(*words, status=2) for words in (["benchmark", "step"], ["demo"], ["plan", "--calibrate", "here.yaml"])]
    assert all(text.count("\n") == 1 and "checkout" in text for text in needs)
    for text in (missing, *helps, *needs):
        assert "pretrain.py" not in text and "tools/" not in text and "Traceback" not in text
