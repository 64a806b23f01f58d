"""Verification: equal layouts say so, and a doctored recording is named by step, tensor and rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.training.verify import compare, single_process
from tests.support import forked_programs
from tests.support.configs import config_of, write_tokens
from tests.support.spaces.layouts import NAMED, with_layers

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 101)


@pytest.fixture(scope="module")
def recordings(prefix, tmp_path_factory) -> tuple[Path, Path]:
    """Both sides of a comparison: tp 2 and one process."""
    config = from_dict(config_of(with_layers({**NAMED, "pp": 1, "dp": 1, "microbatches": 1, "zero": 0}), prefix))
    directory = tmp_path_factory.mktemp("recordings")
    return recorded(config, 2, directory / "layout"), recorded(single_process(config), 1, directory / "single")


def recorded(config: Config, ranks: int, directory: Path) -> Path:
    """As `verify.run_ranks`, which the command lines below use, from the process that has imported torch."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(to_dict(config)))
    succeeded, output = forked_programs.run(["-m", "megalite.training.verify", str(directory), str(STEPS)], ranks)
    assert succeeded, output
    return directory


def test_a_run_with_graphs_is_compared_with_one_without(prefix: str) -> None:
    config = from_dict(config_of(with_layers({**NAMED, "microbatches": 1}), prefix, train={"graphs": True}))
    assert not single_process(config).train.graphs and config.train.graphs


def test_equal_runs_have_no_difference(recordings):
    assert compare(*recordings, relative=1e-5, absolute=2e-5) is None


def test_names_the_step_tensor_and_rank_that_differ(recordings, tmp_path):
    layout, single = recordings
    doctored = tmp_path / "doctored"
    doctored.mkdir()
    for file in layout.iterdir():
        (doctored / file.name).write_bytes(file.read_bytes())
    tensors = load_file(doctored / "step_2.safetensors")
    tensors["weight/layers.1.attention.q.weight"][-1, 0] += 0.5  # the last row lies on the second tp rank
    save_file(tensors, doctored / "step_2.safetensors")
    difference = compare(doctored, single, relative=1e-5, absolute=2e-5)
    assert difference is not None
    assert (difference.step, difference.tensor, difference.rank) == (2, "layers.1.attention.q.weight", 1)
    assert difference.error == pytest.approx(0.5, rel=1e-3)
    scalars = json.loads((doctored / "scalars.json").read_text())
    scalars[0]["grad_norm"] *= 1.1
    (doctored / "scalars.json").write_text(json.dumps(scalars))
    difference = compare(doctored, single, relative=1e-5, absolute=2e-5)
    assert difference is not None and (difference.step, difference.tensor, difference.rank) == (1, "grad_norm", None)


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools/verify.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)


def test_command_line(prefix):
    """A mixture of experts on two ranks, in fp64, where no token chooses other experts."""
    model = [
        "--model.preset",
        "tiny",
        "--model.num_hidden_layers",
        "2",
        "--model.num_experts",
        "4",
        "--model.moe_intermediate_size",
        "32",
    ]
    data = ["--data.train", prefix, "--data.sequence_length", "16", "--train.precision", "fp64"]
    batch = ["--train.global_batch_size", "8", "--train.micro_batch_size", "2"]
    done = run_tool("--dp", "2", "--parallel.ep", "2", "--steps", "2", "--json", *model, *data, *batch)
    assert done.returncode == 0, done.stderr
    layout = {"tp": 1, "pp": 1, "dp": 2, "cp": 1, "ep": 2}
    assert json.loads(done.stdout) == {"equal": True, "steps": 2, "layout": layout, "difference": None}


def test_wrong_configuration_is_one_message(prefix):
    done = run_tool("--tp", "3", "--model.preset", "tiny", "--data.train", prefix)
    assert done.returncode == 2 and done.stdout == ""
    assert "parallel.tp = 3" in done.stderr and "Traceback" not in done.stderr
