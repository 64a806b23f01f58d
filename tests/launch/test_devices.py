"""Which device a rank computes on, and what is in its environment before it touches one. No GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megalite_kernels import attention_routes
from megalite_kernels.device_routes import DeviceRoutes
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.launch.environment import on_one_gpu
from megalite.launch.process import choose_device
from megalite.training.kernel_choice import routes
from tests.support.configs import write_tokens

# Ends the process where torch is about to be imported: no device can have been touched before.
AT_IMPORT_OF_TORCH = """
import json, os, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            print(json.dumps({name: os.environ.get(name) for name in NAMES}))
            raise SystemExit(0)

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "NCCL_SOCKET_IFNAME")
sys.meta_path.insert(0, Stop())
from megalite.commands.train import main
main()
"""


@pytest.fixture
def machine(monkeypatch):
    """Sets the visible GPUs, the ranks of the machine and this one's number."""

    def given(visible: int, ranks: int, rank: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    return given


@pytest.mark.parametrize(
    "visible, ranks, rank, expected", [(0, 4, 3, "cpu"), (4, 4, 3, "cuda:3"), (8, 2, 1, "cuda:1"), (1, 1, 0, "cuda:0")]
)
def test_each_local_rank_has_the_gpu_of_its_number(machine, visible, ranks, rank, expected):
    machine(visible, ranks, rank)
    assert choose_device() == torch.device(expected)


def test_the_one_visible_gpu_is_the_ranks_own(machine):
    """As SLURM's --gpus-per-task=1 starts ranks."""
    machine(visible=1, ranks=8, rank=5)
    assert choose_device() == torch.device("cuda:0")


def test_too_few_gpus_are_an_error_not_a_run_on_the_cpu(machine):
    machine(visible=2, ranks=4, rank=0)
    with pytest.raises(ConfigError, match=r"4 ranks and 2 visible GPUs.*at most 2 ranks.*CUDA_VISIBLE_DEVICES="):
        choose_device()


def test_ranks_that_share_a_gpu_are_named():
    results = [
        {"host": host, "gpu": gpu}
        for host, gpu in (("a", "x"), ("a", "y"), ("b", "x"), ("a", "x"), ("c", None), ("c", None))
    ]
    assert on_one_gpu(results) == ["ranks 0, 3 share the same GPU on a"]


def test_the_report_names_attentions_implementation_and_why_not_a_faster_one(monkeypatch):
    config = from_dict({"model": {"preset": "tiny"}, "data": {"sequence_length": 200}, "train": {"precision": "bf16"}})
    assert routes(config, torch.device("cpu"), documents=False) == []
    for name, allowed in (("can_use_cudnn_attention", True), ("can_use_flash_attention", False)):
        monkeypatch.setattr(torch.backends.cuda, name, lambda parameters, allowed=allowed: allowed)
    monkeypatch.setattr(attention_routes, "measured", lambda device: DeviceRoutes())
    monkeypatch.setattr(attention_routes, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(attention_routes, "takes_triton", lambda x: True)
    with FakeTensorMode():
        (line,) = routes(config, torch.device("cuda"), documents=False)
        (documents,) = routes(config, torch.device("cuda"), documents=True)
        config.parallel.cp, config.data.sequence_length = 2, 199  # whole rows, padded to 200
        assert routes(config, torch.device("cuda"), documents=False) == [line]
        config.parallel.context = "ring"
        assert routes(config, torch.device("cuda"), documents=False) == [], "parts of rows have one implementation"
    assert line == (
        "attention: triton; not cudnn (200 positions are no multiple of 128); not flash (torch rejects it); "
        "no routes were measured on this device"
    )
    assert documents == "attention with documents: triton; no routes were measured on this device"


def environment(config: Path, **given: str) -> dict[str, str | None]:
    """What a training process has in its environment when it imports torch."""
    import json

    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "CUDA_", "NCCL_"))
    } | given
    command = [sys.executable, "-c", AT_IMPORT_OF_TORCH, "--config", str(config)]
    completed = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
    values: dict[str, str | None] = json.loads(completed.stdout)
    return values


def test_variables_are_set_before_anything_can_touch_a_device(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 64}\n"
        f"data: {{train: {write_tokens(tmp_path, 64)}, sequence_length: 8}}\n"
        "train: {steps: 1, global_batch_size: 4}\n"
        "network: {interface: eth7, variables: {CUDA_DEVICE_MAX_CONNECTIONS: 16}}\n"
    )
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "NCCL_SOCKET_IFNAME")
    assert environment(config) == dict(zip(names, ("16", "expandable_segments:True", "eth7"), strict=True))
    kept = environment(config, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64", NCCL_SOCKET_IFNAME="ib0")
    assert kept == dict(zip(names, ("16", None, "ib0"), strict=True))
