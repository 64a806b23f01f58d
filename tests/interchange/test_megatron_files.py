"""Names, order and padding in Megatron-LM's files, and what is said of files that cannot be read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import manifest_of
from megalite.checkpoint.inspect import whole
from megalite.commands import convert
from megalite.interchange.dcp_files import DcpDirectory
from tests.interchange.test_megatron_state import CASE, DELTA, MAMBA, command, saved
from tests.support.configs import write_tokens

ITERATION = "iter_0000002"
FIRST = f"{ITERATION}/mp_rank_00_000/model_optim_rng.pt"
LAYER = "decoder.layers.0."


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), CASE["vocab_size"])


@pytest.fixture(scope="module")
def exported(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bf16, with dist and legacy (tp 2, pp 2) exports of it."""
    directory = tmp_path_factory.mktemp("exported")
    checkpoint, _ = saved(prefix, {"tie_word_embeddings": True}, "bf16", directory)
    assert command("export", checkpoint, directory / "dist", "--format", "megatron") == 0
    layout = ["--tp", "2", "--pp", "2", "--virtual_stages", "2"]
    assert command("export", checkpoint, directory / "legacy", "--format", "megatron-legacy", *layout) == 0
    return directory


def ours(directory: Path, name: str, kind: str = "weight") -> Tensor:
    manifest = manifest_of(directory)
    tensor = manifest.tensors[f"{kind}/{name}"]
    return torch.from_numpy(whole(manifest, tensor)).view(getattr(torch, tensor.dtype)).squeeze(-1)


def test_queries_keys_and_values_stand_by_group_and_ranks_have_halves_of_gate_and_up(exported: Path) -> None:
    """The order of Megatron-LM, written out: [groups, queries + key + value, channels]."""
    checkpoint = exported / "run/checkpoints/step_00000002"
    q, k, v = (ours(checkpoint, f"layers.0.attention.{part}.weight").unflatten(0, (-1, 8)) for part in "qkv")
    qkv = torch.cat([q.unflatten(0, (2, 2)), k[:, None], v[:, None]], 1).flatten(0, 2)
    gate, up = (ours(checkpoint, f"layers.0.mlp.{part}.weight") for part in ("gate", "up"))
    files = DcpDirectory(exported / "dist" / ITERATION)
    key = "decoder.layers.self_attention.linear_qkv.weight"
    assert torch.equal(files.read(f"optimizer.state.fp32_param.{key}", (0,)), qkv)
    assert torch.equal(files.read(key, (0,)), qkv.bfloat16())
    fc1 = "decoder.layers.mlp.linear_fc1.weight"
    assert torch.equal(files.read(f"optimizer.state.fp32_param.{fc1}", (0,)), torch.cat([gate, up]))
    for rank in range(2):
        content = torch.load(exported / "legacy" / FIRST.replace("00_000", f"0{rank}_000"), weights_only=False)
        half = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]).bfloat16()
        assert torch.equal(content["model0"][f"{LAYER}mlp.linear_fc1.weight"], half)
        rows = ours(checkpoint, "embedding.weight")  # 90, padded to 128 for each of two ranks
        padded = torch.cat([rows, rows.new_zeros(256 - len(rows), rows.shape[1])]).chunk(2)[rank].bfloat16()
        assert torch.equal(content["model0"]["embedding.word_embeddings.weight"], padded)
        last = torch.load(exported / "legacy" / FIRST.replace("00_000", f"0{rank}_001"), weights_only=False)
        assert torch.equal(last["model1"]["output_layer.weight"], padded), "the copy of a tied embedding"
        # virtual stages: rank 0 has layers 0 and 2, rank 1 has layers 1 and 3
        key = f"{LAYER}self_attention.linear_proj.weight"
        for stage, part in ((0, content["model0"]), (1, last["model0"]), (2, content["model1"]), (3, last["model1"])):
            out = ours(checkpoint, f"layers.{stage}.attention.out.weight")
            assert torch.equal(part[key], out.chunk(2, 1)[rank].bfloat16())


@pytest.mark.parametrize(
    ("model", "module", "parts"),
    [
        (MAMBA, "mixer.in_proj.weight", {"z": "z", "x": "x", "B": "B", "C": "C", "dt": "dt"}),
        (MAMBA, "mixer.conv1d.bias", {"x": "conv_x", "B": "conv_B", "C": "conv_C"}),
        (
            DELTA,
            "self_attention.in_proj.weight",
            {"query": "q", "key": "k", "value": "v", "z": "z", "beta": "b", "alpha": "a"},
        ),
    ],
    ids=["mamba", "convolution", "delta"],
)
def test_parts_of_mixers_are_tensors_of_their_own(
    prefix: str, tmp_path: Path, model: dict[str, Any], module: str, parts: dict[str, str]
) -> None:
    checkpoint, _ = saved(prefix, model, "fp32", tmp_path)
    assert command("export", checkpoint, tmp_path / "out", "--format", "megatron", "--weights_only") == 0
    files = DcpDirectory(tmp_path / "out" / ITERATION)
    for theirs, part in parts.items():
        name = f"layers.0.mixer.{part}.{module.rpartition('.')[2]}"
        assert torch.equal(files.read(f"{LAYER}{module}.{theirs}"), ours(checkpoint, name)), theirs
    assert not [name for name in files.tensors if name.startswith("optimizer.")]


def test_padding_is_kept_or_left_out(exported: Path, tmp_path: Path) -> None:
    for options, rows in (([], 256), (["--drop_padding"], 90)):
        place = tmp_path / f"rows-{rows}"
        assert command("import", f"megatron:{exported / 'legacy'}", place, *options) == 0
        assert len(ours(place, "embedding.weight")) == rows
        again = tmp_path / f"again-{rows}"
        assert command("export", place, again, "--format", "megatron-legacy") == 0  # the layout of the import
        one, other = (torch.load(each / FIRST, weights_only=False)["model0"] for each in (exported / "legacy", again))
        assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the first file of the legacy format."""

    def edit(directory: Path) -> None:
        content = torch.load(directory / FIRST, weights_only=False)
        change(content)
        torch.save(content, directory / FIRST)

    return edit


def rename(content: dict[str, Any], old: str, new: str) -> None:
    content["model0"] = {name.replace(old, new): value for name, value in content["model0"].items()}


def without_group(content: dict[str, Any]) -> None:
    content["optimizer"]["optimizer"]["param_groups"][1]["params"].pop()


def distributed(directory: Path) -> None:
    """As saved with the distributed optimizer, without its file."""
    for path in directory.rglob("*.pt"):
        content = torch.load(path, weights_only=False)
        content["optimizer"] = {"optimizer": {"param_groups": [{"step": 2}]}}
        torch.save(content, path)


def other_buffers(directory: Path) -> None:
    distributed(directory)
    tensors = {name: torch.zeros(10) for name in ("param", "exp_avg", "exp_avg_sq")}
    content = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): tensors | {"numel_unpadded": 10}}}
    for path in directory.rglob("*.pt"):
        torch.save(content, path.with_name("distrib_optim.pt"))


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a file is missing": ("legacy", lambda at: (at / FIRST).unlink(), "model_optim_rng.pt is missing"),
    "a rank is missing": ("legacy", lambda at: shutil.rmtree((at / FIRST).parent), "expected all 4 of tp 2, pp 2"),
    "a tensor is missing": (
        "legacy",
        edited(lambda content: content["model0"].pop(f"{LAYER}mlp.linear_fc2.weight")),
        "linear_fc2.weight is missing",
    ),
    "an unknown tensor": (
        "legacy",
        edited(lambda content: content["model0"].update({f"{LAYER}adapter.weight": torch.zeros(2)})),
        "adapter.weight is not a tensor of the model",
    ),
    "another shape": (
        "legacy",
        edited(lambda content: content["model0"].update({f"{LAYER}mlp.linear_fc2.weight": torch.zeros(2, 3)})),
        r"linear_fc2.weight has shape [2, 3] on each of 2 tp ranks, expected [32, 48] in all",
    ),
    "modules before megatron-core": (
        "legacy",
        edited(lambda content: rename(content, "embedding.word_embeddings.weight", "language_model")),
        "modules of Megatron-LM before megatron-core",
    ),
    "MTP": (
        "legacy",
        edited(lambda content: content["model0"].update({"mtp.layers.0.enorm.weight": torch.zeros(2)})),
        "--drop_mtp",
    ),
    "another tied copy": (
        "legacy",
        edited(lambda content: content["model0"]["embedding.word_embeddings.weight"].add_(1)),
        "differ (model), but the model shares this tensor",
    ),
    "weights that are not the rounded ones": (
        "legacy",
        edited(lambda content: content["model0"][f"{LAYER}mlp.linear_fc2.weight"].add_(1)),
        "differs from its fp32 master weight",
    ),
    "another order of parameters": ("legacy", edited(without_group), "Groups other than those with and without"),
    "no state of the distributed optimizer": ("legacy", distributed, "distrib_optim.pt is missing: it has the state"),
    "other buffers": ("legacy", other_buffers, "elements of a buffer of the distributed optimizer, found 10"),
    "an argument that is not supported": (
        "legacy",
        edited(lambda content: vars(content["args"]).update(rotary_interleaved=True)),
        "was trained with rotary_interleaved=true, which is not supported",
    ),
    "no arguments": ("legacy", edited(lambda content: content.pop("args")), "Pass --model"),
    "a truncated file": (
        "dist",
        lambda at: (at / ITERATION / "__0_0.distcp").write_bytes(b"0"),
        "__0_0.distcp is truncated",
    ),
    "another backend": (
        "dist",
        lambda at: (at / ITERATION / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "sharded_backend is 'zarr'",
    ),
    "a wrong tracker": (
        "dist",
        lambda at: (at / "latest_checkpointed_iteration.txt").write_text("9"),
        "names iteration 9",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_read_is_named(
    exported: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    form, damage, message = DAMAGE[name]
    shutil.copytree(exported / form, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(SystemExit) as end:
        convert.main(["import", f"megatron:{tmp_path / 'copy'}", str(tmp_path / "out")])
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_apply_are_named(
    exported: Path, tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(exported / "run/checkpoints/step_00000002")
    other = str(tmp_path / "other")
    for arguments, message in (
        (["export", checkpoint, other, "--format", "megatron", "--tp", "2"], "--format megatron-legacy"),
        (["export", checkpoint, other, "--format", "megatron-legacy", "--tp", "4"], "--tp 4 does not divide"),
        (
            ["export", checkpoint, other, "--format", "megatron-legacy", "--pp", "3"],
            "do not divide model.num_hidden_layers=4",
        ),
        (["export", checkpoint, other, "--weights_only"], "--weights_only applies to --format megatron"),
        (["import", checkpoint, other, "--drop_padding"], "--drop_padding applies to megatron:DIR only"),
        (["export", f"megatron:{exported / 'dist'}", other], "import megatron:"),
        (["export", str(exported / "dist"), other], f"convert import megatron:{exported / 'dist'} CHECKPOINT_DIR"),
        (
            ["import", f"megatron:{exported / 'dist'}", other, "--model", "llama-3.2-1b"],
            "model.hidden_size is 2048, but 32 in",
        ),
    ):
        with pytest.raises(SystemExit):
            convert.main(arguments)
        assert message in capsys.readouterr().err


def test_a_model_without_arguments_in_megatron_is_named(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = saved(prefix, {"attention_softcap": 30.0}, "fp32", tmp_path)
    with pytest.raises(SystemExit):
        command("export", checkpoint, tmp_path / "out", "--format", "megatron")
    assert "no argument for model.attention_softcap=30.0" in capsys.readouterr().err
