"""Nothing in a pickle of another program runs."""

from __future__ import annotations

import io
import os
import pickle
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalite.interchange.dcp_files import DcpDirectory
from megalite.interchange.inert_pickles import Inert, PickleError, load_metadata, load_pt


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_malicious_object_is_named_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    weights = {"model": {"w": torch.zeros(2)}, "args": Malicious(trap)}
    torch.save(weights, tmp_path / "model_optim_rng.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(trap)))
    for read, name in ((load_pt, "model_optim_rng.pt"), (load_metadata, ".metadata")):
        with pytest.raises(PickleError, match=r"contains \w*\.?mkdir, which is neither a tensor nor a record"):
            read(tmp_path / name)
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp/.metadata").read_bytes())
    metadata.planner_data = Malicious(trap)
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(PickleError, match="mkdir"):
        DcpDirectory(tmp_path / "dcp")
    assert not trap.exists()
    pickle.loads(pickle.dumps(Malicious(trap)))
    assert trap.exists(), "it runs where a pickle is loaded"


def test_objects_of_a_dcp_directory_are_read_without_running_them(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    dcp.save(
        {"state": Malicious(trap), "step": 7, "w": torch.arange(6.0).view(2, 3)},
        checkpoint_id=tmp_path / "d",
        no_dist=True,
    )
    files = DcpDirectory(tmp_path / "d")
    assert files.read_object("step") == 7
    assert torch.equal(files.read("w"), torch.arange(6.0).view(2, 3))
    assert torch.equal(files.read("w", (1,)), torch.tensor([3.0, 4.0, 5.0]))
    with pytest.raises(PickleError, match=r"__0_0.distcp \(state\) contains \w+.mkdir"):
        files.read_object("state")
    assert not trap.exists()


def test_arguments_and_states_of_random_numbers_become_records(tmp_path: Path) -> None:
    """What a file of Megatron-LM has besides tensors."""
    content = {
        "args": Namespace(num_layers=2, save=Path("a"), exit_signal=signal.SIGTERM, window_size=(3, 0)),
        "rng_state": [{"np_rng_state": np.random.get_state(), "extra": io.BytesIO(b"x")}],
        "model": {"w": torch.arange(4.0)},
    }
    torch.save(content, tmp_path / "file.pt")
    content = load_pt(tmp_path / "file.pt")
    assert (content["args"].num_layers, content["args"].window_size) == (2, (3, 0))
    assert isinstance(content["args"].save, Inert) and content["args"].exit_signal.arguments == (signal.SIGTERM.value,)
    assert torch.equal(content["model"]["w"], torch.arange(4.0))


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x04N"])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    for read in (load_pt, load_metadata):
        with pytest.raises(PickleError, match=r"\.metadata"):
            read(tmp_path / ".metadata")
