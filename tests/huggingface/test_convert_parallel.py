"""Runs that start from a Hugging Face directory, each rank reading its own parts: one training step of transformers.
test_layouts.py has every family."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.assembly.parts import make_mesh
from megalite.commands import convert as convert_hf
from megalite.config.load import from_dict
from megalite.data.indexed import IndexedTokens
from megalite.families.model_config import hf_shape
from megalite.huggingface.files import ConversionError
from megalite.training.trainer import Trainer
from tests.commands.jobs import step_from_hf
from tests.huggingface.hf_models import BF16, CASES, VOCAB, make, write
from tests.support.configs import write_tokens
from tests.support.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE, BATCH, LR, DECAY = 24, 4, 3e-4, 0.1
EPS = 1e-8
NAMES = ["llama, one key-value head", "olmo2", "gemma2", "gpt2", "mistral, window"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of `NAMES`."""
    place = tmp_path_factory.mktemp("models")
    return {name: write(CASES[name], place / str(number)) for number, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), VOCAB, count=2000)


def configuration(directory: Path, prefix: str, **parallel: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(Path(prefix).parent), "name": f"from-{directory.name}"},
        "model": hf_shape(str(directory)) | {"init_from": f"hf:{directory}", "from_hf": str(directory)},
        "parallel": {"dp": 1, **parallel},
        "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
        "train": {
            "steps": 1,
            "global_batch_size": BATCH,
            "micro_batch_size": BATCH // parallel.get("dp", 1),
            "grad_clip": 0.0,
        },
        "optimizer": {"lr": LR, "decay": "constant", "weight_decay": DECAY, "eps": EPS},
        "checkpoint": {"load": "none"},
    }


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_one_step_goes_out_as_one_step_of_transformers(name, models, prefix, ranks: RankPool, tmp_path: Path):
    layout = {"tp": 2, "pp": 2, "dp": 2, "zero": 1}
    saved = ranks.run(8, step_from_hf, configuration(models[name], prefix, **layout))[0]
    assert convert_hf.main(["export", saved, str(tmp_path / "out")]) == 0
    from transformers import AutoModelForCausalLM

    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    model = make(CASES[name])
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    groups = [
        {
            "params": [value for value in model.parameters() if (value.dim() > 1) is matrix],
            "weight_decay": DECAY * matrix,
        }
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    logits = model(input_ids=tokens[:-1].view(BATCH, SEQUENCE)).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.step()
    for key, value in model.state_dict().items():
        apart = ours[key] - value
        if key.endswith("attn.c_attn.bias"):  # the keys' part has no gradient but rounding
            q, k, v = apart.chunk(3)
            assert k.abs().max() <= 1e-4
            apart, value = torch.cat((q, v)), torch.cat((value.chunk(3)[0], value.chunk(3)[2]))
        assert apart.norm() <= 1e-5 * value.norm(), key
        assert not torch.equal(value, before[key]) or "c_attn" in key, f"{key} was trained"


def test_another_model_is_refused_and_a_context_may_be_extended(models, prefix):
    directory = models["olmo2"]
    config = configuration(directory, prefix)
    config["model"] |= {"rope_theta": 5e5, "attention_dropout": 0.1, "max_position_embeddings": 128}
    run_config = from_dict(config)
    Trainer(run_config, make_mesh(run_config)).close()
    run_config.model.rms_norm_eps = 1e-3
    another = r"does not match the model of this run: model.rms_norm_eps is 0.001, but 1e-05 in the directory. "
    with pytest.raises(
        ConversionError, match=another + r"Remove model.rms_norm_eps to use the values of model.from_hf\."
    ):
        Trainer(run_config, make_mesh(run_config))
    run_config.model.from_hf = None
    with pytest.raises(ConversionError, match=another + "Set model.from_hf="):
        Trainer(run_config, make_mesh(run_config))


def test_an_imported_checkpoint_of_bf16_starts_a_run_in_fp32(models, prefix, tmp_path: Path):
    name = "mistral, window"
    assert CASES[name].dtype == BF16
    config = configuration(models[name], prefix)
    run_config = from_dict(config)
    one = Trainer(run_config, make_mesh(run_config))
    assert convert_hf.main(["import", str(models[name]), str(tmp_path / "imported")]) == 0
    run_config.model.init_from = str(tmp_path / "imported")
    other = Trainer(run_config, make_mesh(run_config))
    assert one.step().loss == other.step().loss
    one.close(), other.close()


def test_pretrain_starts_from_a_directory_and_names_what_is_wrong_with_it(models, prefix, tmp_path: Path):
    def run(directory: Path) -> subprocess.CompletedProcess[str]:
        options = {
            "model.from_hf": directory,
            "model.init_from": f"hf:{directory}",
            "data.train": prefix,
            "run.dir": tmp_path,
        }
        options |= {
            "data.sequence_length": SEQUENCE,
            "train.steps": 1,
            "train.global_batch_size": 2,
            "train.micro_batch_size": 2,
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        return subprocess.run(
            [sys.executable, ROOT / "pretrain.py", *words], capture_output=True, text=True, timeout=300, check=False
        )

    done = run(models["gpt2"])
    assert done.returncode == 0, done.stderr
    shutil.copytree(models["olmo2"], tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"cut off")
    shutil.rmtree(tmp_path / "run")  # a run that can be resumed reads nothing else
    done = run(tmp_path / "damaged")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "is not a safetensors file or is truncated (7 bytes)" in done.stderr
