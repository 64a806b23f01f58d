"""tools/checkpoint.py: what it says of checkpoints that are known, whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalite import checkpoint
from megalite.checkpoint import inspect as inspecting
from megalite.commands.checkpoint import main
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import Rectangle
from tests.checkpoint import jobs
from tests.support.pool import RankPool

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def save(run: Path, step: int, **changes: torch.Tensor) -> Path:
    tensors = {
        "weight/a": torch.arange(12.0).reshape(3, 4),
        "weight/b": torch.ones(5, dtype=torch.bfloat16),
        "exp_avg/a": torch.full((3, 4), 0.5),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    } | {name.replace("__", "/"): value for name, value in changes.items()}
    directory = run / "checkpoints" / checkpoint.step_name(step)
    parts = [Rectangle(name, tuple(value.shape), (0,) * value.dim(), value) for name, value in tensors.items()]
    checkpoint.save(directory, parts, {"step": step, "config": {"train": {"steps": 9}}}, Mesh(Layout()))
    return directory


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """call(*arguments) → exit status, the JSON on stdout, and what the same says to people."""

    def called(*arguments: str | Path) -> tuple[int, Any, str]:
        words = [str(word) for word in arguments]
        status = main(words)
        text = capsys.readouterr().out
        assert main([*words, "--json"]) == status
        return status, json.loads(capsys.readouterr().out), text

    return called


def test_list_shows_what_is_whole_and_what_is_not(call: Callable[..., Any], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    (folder / "step_00000001" / "rank_00000.bin").write_bytes(b"short")
    (folder / "step_00000002" / "manifest.json").unlink()
    for path in (tmp_path, folder):
        status, content, text = call("list", path)
        first, second, third = content["checkpoints"]
        assert status == 0 and [entry["step"] for entry in content["checkpoints"]] == [1, 2, 3]
        assert "rank_00000.bin is damaged: expected 512 bytes, found 5" in first["problem"]
        assert "manifest.json is missing" in second["problem"] and second["bytes"] is None
        assert third == {
            "name": "step_00000003",
            "step": 3,
            "latest": True,
            "bytes": 512,
            "tensors": 4,
            "problem": None,
            "best": False,
        }
        assert [line.split()[0] for line in text.splitlines()] == [entry["name"] for entry in content["checkpoints"]]
        assert text.splitlines()[2].endswith("whole  (latest)")


def test_inspect_shows_state_and_tensors(call: Callable[..., Any], tmp_path: Path) -> None:
    directory = save(tmp_path, 7)
    status, content, text = call("inspect", tmp_path)
    assert status == 0 and content["checkpoint"] == str(directory)
    assert content["parameters"] == 12 + 5 and content["files"] == {"rank_00000.bin": 512} and content["bytes"] == 512
    assert content["state"] == {"step": 7, "config": {"train": {"steps": 9}}}
    assert content["tensors"]["weight/b"] == {"dtype": "bfloat16", "shape": [5], "chunks": 1, "bytes": 10}
    assert "step: 7" in text and "  scalar  float64 [], 8 B in 1 chunk" in text


def test_verify_names_every_damaged_file(call: Callable[..., Any], ranks: RankPool, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    ranks.run(3, jobs.save, directory, 1, 1, {})
    size = sum(path.stat().st_size for path in directory.glob("*.bin"))
    assert call("verify", directory)[:2] == (
        0,
        {"checkpoint": str(directory), "bytes": size, "whole": True, "damages": []},
    )
    for rank in (0, 2):
        file = directory / f"rank_{rank:05d}.bin"
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    status, content, text = call("verify", directory)
    assert status == 1 and not content["whole"] and len(content["damages"]) == 2
    assert [
        f"rank_{rank:05d}.bin is damaged: expected checksum " in line
        for rank, line in zip((0, 2), text.splitlines(), strict=True)
    ]


def test_diff_measures_what_differs(call: Callable[..., Any], tmp_path: Path) -> None:
    changed = torch.arange(12.0).reshape(3, 4)
    changed[1, 2] += 0.25
    one, same = save(tmp_path / "one", 1), save(tmp_path / "same", 1)
    other = save(
        tmp_path / "other", 1, weight__a=changed, weight__b=torch.ones(6, dtype=torch.bfloat16), new=torch.ones(2)
    )
    assert call("diff", one, same)[:2] == (0, {"one": str(one), "other": str(same), "equal": True, "differences": []})
    status, content, text = call("diff", one, other)
    assert status == 1 and not content["equal"]
    assert content["differences"] == [
        {"tensor": "new", "what": f"only in {other}", "max_abs": None, "relative": None},
        {"tensor": "weight/a", "what": "values", "max_abs": 0.25, "relative": 0.25 / 11},
        {"tensor": "weight/b", "what": "bfloat16 [5] and bfloat16 [6]", "max_abs": None, "relative": None},
    ]
    assert "weight/a: values differ by 0.25, relative 0.0227" in text
    nan = save(tmp_path / "nan", 1, scalar=torch.tensor(float("nan"), dtype=torch.float64))
    assert call("diff", nan, nan)[0] == 0, "the same bits are the same"
    status, content, _ = call("diff", one, nan)
    assert status == 1 and content["differences"] == [
        {"tensor": "scalar", "what": "values", "max_abs": None, "relative": None}
    ]


def test_consolidate_writes_what_safetensors_reads(call: Callable[..., Any], ranks: RankPool, tmp_path: Path) -> None:
    """Cut at random over three ranks, and whole again."""
    directory = tmp_path / "saved"
    ranks.run(3, jobs.save, directory, 1, 1, {"step": 4})
    whole = {name: value for name, value in jobs.whole_tensors(1).items() if value.numel()}
    for name, optimizer in (("weights", False), ("all", True)):
        file = tmp_path / f"{name}.safetensors"
        (manifest := checkpoint.manifest_of(directory)).verify()
        from megalite.checkpoint.inspect import consolidate

        assert consolidate(manifest, file, optimizer) == file.stat().st_size
        tensors = load_file(file)
        expected = (
            whole
            if optimizer
            else {key.removeprefix("weight/"): value for key, value in whole.items() if key.startswith("weight/")}
        )
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], value) for key, value in expected.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.safetensors", "saved", "weights.safetensors"]


def test_consolidate_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save(tmp_path, 1)
    file = tmp_path / "out.safetensors"
    assert main(["consolidate", str(tmp_path), str(file), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["bytes"] == file.stat().st_size and sorted(load_file(file)) == ["a", "b"]


def test_verify_and_consolidate_tell_how_far_they_are(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = checkpoint.manifest_of(checkpoint.find(tmp_path))
    seen: dict[str, tuple[int, int | None]] = {}

    def progress(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        assert done > seen.get(what, (0, None))[0] and unit == "B"
        seen[what] = done, total

    assert inspecting.damages(manifest, progress) == []
    inspecting.consolidate(manifest, tmp_path / "all", True, progress)
    (verified, files), (written, tensors) = seen["verifying"], seen["writing"]
    assert verified == files == sum(manifest.files.values()) and written == tensors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "nowhere"], "No checkpoints found in nowhere"),
        (["inspect", "nowhere"], "nowhere is not a checkpoint: the directory does not exist"),
        (["verify", "damaged/checkpoints/step_00000001"], "manifest.json is damaged: expected b', "),
        (["diff", "whole", "nowhere"], "nowhere is not a checkpoint"),
        (["consolidate", "whole", "there.safetensors"], "there.safetensors already exists"),
        (["consolidate", "whole", "no/where.safetensors"], "the directory no does not exist"),
        (["prune", "whole"], "'prune' is not a"),
        (["diff", "whole"], "the following arguments are required: OTHER"),
    ],
)
def test_bad_input_ends_with_one_message(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "whole", 1)
    (save(tmp_path / "damaged", 1) / "manifest.json").write_text("{}")
    (tmp_path / "there.safetensors").touch()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, len(err.splitlines())) == (2, "", 1) and message in err
