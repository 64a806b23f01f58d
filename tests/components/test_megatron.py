"""Checkpoints that megatron-core writes come in, compute the same, go out unchanged, and are read by it again."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalite.checkpoint import manifest_of
from megalite.checkpoint.inspect import differences
from megalite.commands import convert
from megalite.evaluation.logits import load_stage, our_logits
from megalite.generation.sources import open_source
from tests.components.environments import python_of

SCRIPT = Path(__file__).parent / "megatron_core.py"
ITERATION = "iter_0000007"
FORMATS = {"dist": "megatron", "legacy": "megatron-legacy"}
DISTRIBUTED = ("fully_reshardable", "dp_reshardable", "legacy")  # forms of the distributed optimizer's state
SIZES = {
    **{"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "kv_channels": 16},
    **{"max_position_embeddings": 64, "seq_length": 32, "norm_epsilon": 1e-5},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    # padded to a multiple of 64 for each tp rank
    **{"vocab_size": 250, "padded_vocab_size": 256, "make_vocab_size_divisible_by": 64},
    **{"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 10, "clip_grad": 1.0},
    **{"lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine", "lr_warmup_iters": 2, "weight_decay": 0.1},
    **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "use_distributed_optimizer": False},
    **{"transformer_impl": "local"},
}
LLAMA = SIZES | {
    **{"group_query_attention": True, "num_query_groups": 2, "normalization": "RMSNorm", "swiglu": True},
    **{"add_bias_linear": False, "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0},
    **{"untie_embeddings_and_output_weights": True},
}
GPT = SIZES | {
    **{"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": False},
    **{"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False},
}
EXPERTS = {
    **{"num_experts": 4, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48},
    **{"moe_layer_freq": 1, "moe_router_load_balancing_type": "none", "moe_grouped_gemm": False},
}
LATENTS = {
    **{"multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_layernorm": True},
    **{"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "rope_type": "rope"},
    **{"group_query_attention": False, "num_query_groups": 4},
    **{"moe_layer_freq": [0, 1, 1, 1], "moe_shared_expert_intermediate_size": 32},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_topk_scaling_factor": 2.5, "norm_epsilon": 1e-6},
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"arguments": LLAMA | {"bf16": True}, "layout": {"tp": 2, "pp": 2, "virtual_stages": 2}},
    "gpt": {"arguments": GPT, "layout": {"tp": 2, "pp": 2}},
    "mixture": {"arguments": LLAMA | EXPERTS, "layout": {"pp": 2, "ep": 2}},
    "latents": {"arguments": LLAMA | EXPERTS | LATENTS | {"bf16": True}, "layout": {"tp": 2}},
}


def run(ranks: int, *arguments: Path | str) -> None:
    """Run the script in the environment of megatron-core."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [python_of("megatron"), *launcher, SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=outside | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in both formats, written on 4 ranks: NAME/dist, NAME/legacy, NAME/logits.pt, and with the distributed
    optimizer NAME/distributed."""
    out = tmp_path_factory.mktemp("megatron")
    (out / "cases.json").write_text(json.dumps(CASES))
    run(4, "write", out / "cases.json", out)
    return out


@pytest.fixture(scope="module")
def exported(written: Path) -> Path:
    """All of them imported, and exported again: in/NAME-FORMAT and out/NAME-FORMAT."""
    for name in CASES:
        for form, option in FORMATS.items():
            place = written / "in" / f"{name}-{form}"
            assert convert.main(["import", f"megatron:{written / name / form}", str(place)]) == 0
            assert convert.main(["export", str(place), str(written / "out" / place.name), "--format", option]) == 0
    return written


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All tensors of a DCP directory, read by torch."""
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "chunks")
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return tensors


def leaves(content: Any, path: str = "") -> dict[str, Any]:
    """Path → value of all tensors and empty entries, in order."""
    if isinstance(content, dict):
        return {k: v for key, value in content.items() for k, v in leaves(value, f"{path}/{key}").items()}
    if isinstance(content, (list, tuple)):
        return {k: v for key, value in enumerate(content) for k, v in leaves(value, f"{path}/{key}").items()}
    return {path: content} if content is None or isinstance(content, Tensor) else {}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        equal = value is other[name] if value is None else torch.equal(value, other[name])
        assert equal and (value is None or value.dtype == other[name].dtype), name


@pytest.mark.parametrize("name", CASES)
def test_comes_back_with_the_same_keys_and_bytes(exported: Path, name: str) -> None:
    theirs, ours = (
        tensors_of(place / ITERATION) for place in (exported / name / "dist", exported / "out" / f"{name}-dist")
    )
    assert_same(dict(sorted(theirs.items())), dict(sorted(ours.items())))
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in ours)
    files = sorted((exported / name / "legacy").rglob("*.pt"))
    assert len(files) == max(1, torch.tensor([*CASES[name]["layout"].values()][:2]).prod().item())
    for path in files:
        again = exported / "out" / f"{name}-legacy" / path.relative_to(exported / name / "legacy")
        theirs, ours = (torch.load(file, weights_only=False) for file in (path, again))
        parts = [key for key in theirs if key.startswith("model") or key == "optimizer"]
        assert parts == [key for key in ours if key in parts]
        assert_same(leaves({key: theirs[key] for key in parts}), leaves({key: ours[key] for key in parts}))


@pytest.mark.parametrize("name", CASES)
def test_both_formats_hold_the_same_training_state(exported: Path, name: str) -> None:
    """Written by the same ranks: the legacy format has parameters by number, torch_dist by name."""
    one, other = (manifest_of(exported / "in" / f"{name}-{form}") for form in FORMATS)
    assert not list(differences(one, other))
    assert one.state["step"] == 7 and one.state["samples"] == 28


@pytest.mark.parametrize("name", CASES)
def test_the_distributed_optimizer_has_the_same_training_state(exported: Path, name: str, tmp_path: Path) -> None:
    """Each form of its state, flat buffers by tensor and pipeline stage among them, gives the same checkpoint as that
    of an optimizer that is not distributed."""
    expected = manifest_of(exported / "in" / f"{name}-dist")
    for form in DISTRIBUTED:
        theirs = exported / name / "distributed" / form / ITERATION
        assert convert.main(["import", f"megatron:{theirs}", str(tmp_path / form)]) == 0
        imported = manifest_of(tmp_path / form)
        assert not list(differences(expected, imported)), form
        assert imported.state["step"] == 7 and imported.state["samples"] == 28
        if form == "legacy":
            continue
        out = tmp_path / f"{form}-out"
        assert convert.main(["export", str(tmp_path / form), str(out), "--format", "megatron"]) == 0
        whole = exported / name / "distributed" / "fully_reshardable" / ITERATION  # also of what came from buffers
        assert_same(dict(sorted(tensors_of(whole).items())), dict(sorted(tensors_of(out / ITERATION).items())))
        theirs_common, ours_common = (
            torch.load(at / "common.pt", weights_only=False) for at in (whole, out / ITERATION)
        )
        for key in ("distrib_optim_sharding_type", "chained_optim_avoid_prefix"):
            assert theirs_common["content_metadata"][key] == ours_common["content_metadata"][key]
        assert sorted(leaves_of_groups(theirs_common)) == sorted(leaves_of_groups(ours_common))


def leaves_of_groups(common: dict[str, Any]) -> list[tuple[float, float]]:
    """Weight decay and step of each group of the optimizer, or of the first of chained ones."""
    optimizer = common["optimizer"].get(0, common["optimizer"])
    return sorted((float(each["wd_mult"]), float(each["step"])) for each in optimizer["optimizer"]["param_groups"])


def test_state_at_unknown_places_is_rejected(exported: Path, tmp_path: Path, capsys: Any) -> None:
    """megatron-core 0.16.1 writes state at wrong places if buckets are padded; other sizes do not fill the buffers."""
    wrong, other = exported / "gpt" / "distributed" / "padded" / ITERATION, tmp_path / "other"
    shutil.copytree(exported / "gpt" / "distributed" / "dp_reshardable" / ITERATION, other)
    common = torch.load(other / "common.pt", weights_only=False)
    common["args"].tensor_model_parallel_size = 1
    torch.save(common, other / "common.pt")
    damaged = tmp_path / "damaged"
    shutil.copytree(exported / "gpt" / "distributed" / "dp_reshardable" / ITERATION, damaged)
    metadata = pickle.loads((damaged / ".metadata").read_bytes())
    del metadata.state_dict_metadata[
        next(name for name in metadata.state_dict_metadata if ".bucket_idx_0.exp_avg" in name)
    ]
    (damaged / ".metadata").write_bytes(pickle.dumps(metadata))
    for place, message in (
        (wrong, "differs from its fp32 master weight"),
        (other, "could not be determined"),
        (damaged, "is damaged: expected param, exp_avg, exp_avg_sq of the same length"),
    ):
        with pytest.raises(SystemExit):
            convert.main(["import", f"megatron:{place}", str(tmp_path / "out")])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_computes_the_logits_of_megatron_core(exported: Path, name: str, tmp_path: Path) -> None:
    place = tmp_path / "weights"
    assert convert.main(["import", f"megatron:{exported / name / 'dist'}", str(place), "--weights_only"]) == 0
    tokens = torch.arange(24).view(2, 12) * 7 % 250
    logits = our_logits(load_stage(open_source(place)), tokens)
    expected = torch.load(exported / name / "logits.pt")
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=0)


def test_megatron_core_reads_the_exports(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "logits").mkdir()
    for name in CASES:
        (tmp_path / "checkpoints" / name).symlink_to(exported / "out" / f"{name}-dist" / ITERATION)
    run(1, "read", exported / "cases.json", tmp_path / "checkpoints", tmp_path / "logits")
    for name in CASES:
        assert torch.equal(torch.load(tmp_path / "logits" / f"{name}.pt"), torch.load(exported / name / "logits.pt"))
