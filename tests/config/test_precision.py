"""train.precision = auto: by the device, by the run that is resumed, or by the device that a dry run or a plan is
for."""

from pathlib import Path

import pytest
import yaml

from megalite.commands.models import config_of
from megalite.config import precision
from megalite.config.load import load, load_config, write_config
from megalite.config.schema import Config
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.planner.hardware.devices import find_device
from megalite.training import dry_run

AMX, OLD, ARM = (
    "flags\t\t: fpu avx512f amx_bf16 amx_tile",
    "flags\t\t: fpu avx2 avx512f",
    "Features\t: fp asimd bf16 i8mm",
)
WORDS = ["--train.precision", "auto", "--data.train", "tokens"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 units and without a driver of GPUs."""
    monkeypatch.chdir(tmp_path)
    for name in ("tokens.bin", "tokens.idx"):
        (tmp_path / name).touch()
    (tmp_path / "tokens.json").write_text('{"vocab_size": 257, "eos": 256}')
    (tmp_path / "cpuinfo").write_text(OLD)
    monkeypatch.setattr(precision, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(precision, "LIBRARY", None)  # which can always be loaded
    monkeypatch.setattr(precision, "GPUS", [pattern.lstrip("/") for pattern in precision.GPUS])
    monkeypatch.setattr(precision.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(precision, "version", lambda _: "2.0+cu121")
    monkeypatch.setitem(precision.sys.modules, "torch", None)  # as before it is imported
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    "flags, architecture, gpus, visible, torch, expected, reason",
    [
        (OLD, "x86_64", 0, None, "2.0", "fp32", "this CPU has no bf16 units"),
        (AMX, "x86_64", 0, None, "2.0", "bf16", "this CPU has bf16 units (amx_bf16)"),
        ("flags : avx512_bf16", "x86_64", 0, None, "2.0", "bf16", "(avx512_bf16)"),
        (ARM, "aarch64", 0, None, "2.0", "bf16", "(bf16)"),
        (ARM, "x86_64", 0, None, "2.0", "fp32", "no bf16 units"),
        ("", "x86_64", 0, None, "2.0", "fp32", "no bf16 units"),
        (OLD, "x86_64", 2, None, "2.0", "bf16", "on a GPU"),
        (OLD, "x86_64", 2, "1", "2.0", "bf16", "on a GPU"),
        (OLD, "x86_64", 2, "", "2.0", "fp32", "no bf16 units"),
        (OLD, "x86_64", 2, "-1", "2.0", "fp32", "no bf16 units"),
        (OLD, "x86_64", 2, None, "2.0+cpu", "fp32", "no bf16 units"),
    ],
)
def test_auto_follows_the_device(flags, architecture, gpus, visible, torch, expected, reason, monkeypatch):
    Path("cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(precision.platform, "machine", lambda: architecture)
    monkeypatch.setattr(precision, "version", lambda _: torch)
    for number in range(gpus):
        Path("proc/driver/nvidia/gpus", str(number)).mkdir(parents=True)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    loaded = load(WORDS, world_size=1)
    assert loaded.config.train.precision == expected and loaded.choice is not None
    assert (
        loaded.choice.describe().startswith(f"train.precision = auto is {expected}: ")
        and reason in loaded.choice.describe()
    )


@pytest.mark.parametrize("library, expected", [(None, "bf16"), ("no_such_library.so.1", "fp32")])
@pytest.mark.parametrize("place", ["dev/nvidia0", "dev/dxg", "proc/driver/nvidia/gpus/0000:01:00.0"])
def test_a_gpu_is_found_without_torch_where_its_library_is(library, expected, place, monkeypatch):
    """Under WSL, too; and a container without GPUs sees what its host's driver has in /proc, but has no library."""
    monkeypatch.setattr(precision, "LIBRARY", library)
    Path(place).mkdir(parents=True)
    assert load_config(WORDS, world_size=1).train.precision == expected


def test_a_control_device_alone_is_no_gpu():
    Path("dev/nvidiactl").mkdir(parents=True)
    assert load_config(WORDS, world_size=1).train.precision == "fp32"


def test_what_is_given_stays(monkeypatch):
    Path("cpuinfo").write_text(AMX)
    given = load([*WORDS, "--train.precision", "fp32"], world_size=1)
    assert given.config.train.precision == "fp32" and given.choice is None
    assert load(WORDS[2:], world_size=1).config.train.precision == "fp32", "the default is no auto"


@pytest.mark.parametrize("start", ["auto", "runs/a", "runs/a/checkpoints/step_00000002", "runs/a/checkpoints/latest"])
def test_a_resumed_run_keeps_what_its_configuration_records(start):
    Path("cpuinfo").write_text(AMX)
    first = load_config([*WORDS, "--run.name", "a"], world_size=1)
    write_config(first, first.run.directory)
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["train"]["precision"] == "bf16"
    Path("cpuinfo").write_text(OLD)
    resumed = [*WORDS, "--run.name", "a", "--checkpoint.load", start]
    if start == "auto":
        assert load_config(resumed, world_size=1).train.precision == "fp32", "nothing is saved: it starts at step 0"
    step = Path("runs/a/checkpoints/step_00000002")
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (step.parent / "latest").write_text(step.name)
    loaded = load(resumed, world_size=1)
    assert loaded.config.train.precision == "bf16" and loaded.choice is not None and loaded.choice.device is None
    assert (
        load_config([*resumed, "--checkpoint.load", "none", "--run.name", "b"], world_size=1).train.precision == "fp32"
    )


@pytest.mark.parametrize("name", ["finetune-chat", "finetune-lora"])
def test_shipped_configurations_for_every_machine_follow_it(name):
    words = [
        "--config",
        name,
        "--model.preset",
        "tiny",
        "--data.train",
        "tokens",
        "--data.packing",
        "false",
        "--model.vocab_size",
        "257",
    ]
    words += ["--data.sequence_length", "64", "--model.init_from", "none"]
    assert load_config(words, world_size=1).train.precision == "fp32"
    assert dry_run.read(words, 4, "cuda").train.precision == "bf16"
    assert dry_run.read(words, 4, "cpu").train.precision == "fp32"


def test_a_plan_is_in_the_precision_of_its_gpu():
    Path("run.yaml").write_text("model: {preset: tiny}\ntrain: {precision: auto}")
    for gpu, expected in (("h100", "bf16"), ("v100-32gb", "fp16")):
        assert config_of("run.yaml", 8, precision=find_device(gpu).own_precision).train.precision == expected
    assert config_of("run.yaml", 1, precision=None).train.precision == "fp32", "that of this machine"
    Path("run.yaml").write_text("model: {preset: tiny}\ntrain: {precision: fp32}")
    assert config_of("run.yaml", 8).train.precision == "fp32"


def test_rules_see_what_it_becomes(capsys):
    with pytest.raises(SystemExit):
        load_config([*WORDS, "--train.grad_dtype", "bf16"], world_size=1)
    assert "train.grad_dtype = bf16 requires train.precision = bf16, not fp32" in capsys.readouterr().err
    Path("cpuinfo").write_text(AMX)
    assert load_config([*WORDS, "--train.grad_dtype", "bf16"], world_size=1).train.grad_dtype == "bf16"


def test_a_run_without_a_stored_configuration_follows_the_device():
    Path("manifest.json").touch()
    config = Config(checkpoint=CheckpointConfig(load="."))
    Path("config.yaml").write_text("train: [")
    assert precision.chosen(config).precision == "fp32"
