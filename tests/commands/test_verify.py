"""Verification: equal layouts say so, and a doctored recording is named by step, tensor and rank."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megalite.commands import verify as verify_command
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.training import verify
from megalite.training.fp8_comparison import Fp8Difference
from megalite.training.verify import compare, single_process
from tests.support import forked_programs
from tests.support.configs import config_of, write_tokens
from tests.support.preferences import VOCAB, write_preferences
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


def test_ranks_know_the_objective_of_an_extension(tmp_path):
    (tmp_path / "own.py").write_text(
        "from megalite.config.extensions import objective\n"
        "from megalite.objectives.simpo import SimPO\n\n@objective('mine')\nclass Mine(SimPO):\n    pass\n"
    )
    case = with_layers(
        {**NAMED, "pp": 1, "dp": 1, "microbatches": 1, "zero": 0, "tp": 1, "vocab_size": VOCAB, "masked": False}
    )
    data = write_preferences(tmp_path / "pairs", [(2, 3, 4)] * 4)
    config = config_of(case, data, train={"objective": "mine"})
    config["run"] = {"extensions": [str(tmp_path / "own.py")]}
    recording = recorded(from_dict(config), 1, tmp_path / "recording")
    assert len(json.loads((recording / "scalars.json").read_text())) == STEPS


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


def run_fp8(prefix: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit status and stdout of the command, whose ranks are forked from the process that has imported torch."""
    model = {"vocab_size": 101, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    model |= {"num_key_value_heads": 4, "num_hidden_layers": 2}
    batch = ["--data.sequence_length", "16", "--train.global_batch_size", "4", "--train.micro_batch_size", "2"]
    words = [word for name, value in model.items() for word in (f"--model.{name}", str(value))]
    status = verify_command.main(["--fp8", "2", "--data.train", prefix, *words, *batch, *options])
    return status, capsys.readouterr().out


def forked(config: Config, steps: int, directory: Path, on_cpu: bool, progress: object, module: str) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(to_dict(config)))
    succeeded, output = forked_programs.run(
        ["-m", module, str(directory), str(steps)],
        ranks=math.prod(getattr(config.parallel, axis) or 1 for axis in ("tp", "pp", "dp", "cp")),
    )
    assert succeeded, output


def test_a_run_in_fp8_is_compared_with_one_in_its_compute_dtype(prefix, capsys, monkeypatch):
    monkeypatch.setattr(verify, "run_ranks", forked)
    status, out = run_fp8(prefix, capsys, "--train.fp8", "block", "--pp", "2", "--json")
    result = json.loads(out)
    assert status == 0 and (result["equal"], result["steps"], result["fp8"]) == (True, 2, "block")
    assert all(got != plain and got == pytest.approx(plain, rel=0.05) for got, plain in result["losses"])
    assert list(result["errors"]) == [
        f"layers.{layer}.{name}.weight"
        for layer in (0, 1)
        for name in ("attention.qkv", "attention.out", "mlp.in", "mlp.down")
    ]
    # an infinite weight
    difference = Fp8Difference(1, "layers.1.mlp.in.weight", "forward", "w", 1, math.inf)
    findings = {"key": [1, 0, 6], "first": asdict(difference), "errors": []}

    def faulty(config: Config, steps: int, directory: Path, *others: object) -> None:
        directory.mkdir()
        for step in (1, 2):
            (directory / f"step_{step}.json").write_text("NaN" if config.train.fp8 != "none" else "4.5")
        for rank, entry in enumerate(
            ({**findings, "key": [1, 1, -2]}, findings, {"key": None, "first": None, "errors": []})
        ):
            (directory / f"rank_{rank}.json").write_text(json.dumps(entry))

    monkeypatch.setattr(verify, "run_ranks", faulty)
    status, out = run_fp8(prefix, capsys, "--train.fp8", "block")
    assert status == 1 and out.splitlines()[-1] == f"different: {difference}"
    status, out = run_fp8(prefix, capsys, "--train.fp8", "block", "--json")
    assert status == 1 and json.loads(out)["losses"] == [[None, 4.5]] * 2
    assert json.loads(out)["difference"] == asdict(difference) | {"excess": None}


@pytest.mark.parametrize(
    "options, message",
    [((), "train.fp8 = none. Set --train.fp8 block"), (("--train.fp8", "block", "--steps", "3"), "--fp8 N")],
)
def test_what_a_comparison_of_fp8_needs(options, message, prefix, capsys):
    with pytest.raises(SystemExit) as ended:
        run_fp8(prefix, capsys, *options)
    assert ended.value.code == 2 and message in capsys.readouterr().err


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
