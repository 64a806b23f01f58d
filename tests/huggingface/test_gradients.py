"""The gradient of every weight against transformers, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.data.indexed import IndexedTokens
from megalite.families.model_config import hf_config, hf_shape
from megalite.huggingface.tensor_places import places
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.huggingface.hf_models import CASES, VOCAB, as_in_files, make, tolerance, write
from tests.support.configs import write_tokens

SEQUENCE, BATCH, BETA = 24, 2, 0.9
NAMES = [
    "llama, biases, head_dim",
    "mistral, window",
    "qwen2, tied",
    "qwen3, tied",
    "olmo2",
    "phi3, partial rope, window",
    "gemma",
    "gemma2",
]
NAMES += [
    "smollm3, windows",
    "arcee",
    "gpt2",
    "starcoder2, window",
    "granite",
    "nemotron, tied, biases",
    "stablelm, norms of each head",
    "gpt_neox",
]
NAMES += [
    "olmo3, yarn rope",
    "gemma3, linear rope, cap",
    "glm",
    "glm4",
    "cohere, norms of each head",
    "cohere2",
    "ministral, some windows",
]
NAMES += ["seed_oss", "ernie4_5, untied, biases", "jais2", "hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat", "apertus"]
NAMES += ["falcon, one key-value head", "falcon, new architecture", "falcon, in sequence, biases"]
NAMES += [
    "mixtral",
    "olmoe",
    "qwen2_moe, a dense layer",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v2, lite, yarn rope",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
]
NAMES += ["glm4_moe", "gpt_oss", "mimo_v2_flash", "laguna", "laguna, tied, gates of channels, yarn rope"]
NAMES += ["dots1", "solar_open", "exaone4", "exaone_moe", "ministral3", "glm4_moe_lite", "youtu", "mistral4"]
NAMES += ["granitemoe", "granitemoeshared, tied, biases", "flex_olmo", "minimax_m2", "hy_v3", "afmoe"]
NAMES += ["ernie4_5_moe, every second layer, a least sum", "cohere2_moe", "cohere2_moe, sigmoid, RMSNorm, sums"]
NAMES += ["bamba", "granitemoehybrid", "falcon_h1, tied, norm first, factors", "nemotron_h"]
NAMES += ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe"]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), VOCAB, count=200)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_transformers(name: str, prefix: str, tmp_path: Path) -> None:
    """Ours are read from AdamW's first moment, which is (1 - beta) times the gradient after one step."""
    case = CASES[name]._replace(dtype=torch.float32, shard="5GB")
    directory = write(case, tmp_path / "theirs")
    config = from_dict(
        {
            "run": {"dir": str(tmp_path), "name": "run"},
            "model": hf_shape(str(directory)) | {"init_from": f"hf:{directory}", "from_hf": str(directory)},
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
            "train": {"steps": 1, "global_batch_size": BATCH, "micro_batch_size": BATCH, "grad_clip": 0.0},
            "optimizer": {"betas": [BETA, 0.95], "decay": "constant"},
            "checkpoint": {"load": "none"},
        }
    )
    trainer = Trainer(config, make_mesh(config))
    result = trainer.step()
    ours = global_tensors(trainer, ("exp_avg",))
    trainer.close()
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    model = make(case)
    loss = torch.nn.functional.cross_entropy(
        model(input_ids=tokens[:-1].view(BATCH, SEQUENCE)).logits.flatten(0, 1), tokens[1:]
    )
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    gradients = as_in_files({key: value.grad for key, value in model.named_parameters()})
    gradients["embed_out.weight"] = gradients.get("lm_head.weight")  # the name in GPT-NeoX's files
    largest = max(value.abs().max().item() for value in gradients.values() if value is not None)
    for key, place in places(config.model, hf_config(directory)["model_type"]).items():
        if ".indexer." in key:  # a selection has no gradient, and the loss of indexers is off
            assert f"exp_avg/{key}" not in ours and all(gradients[theirs] is None for theirs in place.tensors)
            continue
        own = ours[f"exp_avg/{key}"] / (1 - BETA)
        pieces = torch.cat([gradients[theirs] for theirs in place.tensors])
        whole = pieces.view(place.shape) if place.experts is None else place.flat(pieces)
        expected = place.read(whole, [0] * own.dim(), own.shape)
        assert (own - expected).norm() <= tolerance(name) * expected.norm() + 1e-6 * largest, key
