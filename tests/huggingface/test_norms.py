"""The norms of each family in bf16 beside transformers': they round in the same places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.families.model_config import hf_shape
from megalite.model.mixer_block import MixerBlock
from megalite.parallel.node import Chain
from megalite.parallel.tensor.gated_norm import GatedNorm
from megalite.parallel.tensor.norm import Norm
from megalite.training.trainer import Trainer
from tests.huggingface.hf_models import CASES, VOCAB, write
from tests.support.configs import write_tokens

GATED = ("qwen3_next", "olmo_hybrid", "kimi_linear", "nemotron_h", "granitemoehybrid", "bamba")
GATED += ("falcon_h1, tied, norm first, factors",)
NAMES = (*GATED, "lfm2", "llama, biases, head_dim", "olmo2", "gemma", "gpt_oss", "flex_olmo", "afmoe")
ROWS = 256


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), VOCAB, count=200)


def norms_of(trainer: Trainer) -> list[Norm | GatedNorm]:
    modules = [module for stage in trainer.parts.runtime.stages.values() for module in stage.modules()]
    gated = [
        module.mixer.norm for module in modules if isinstance(module, MixerBlock) and hasattr(module.mixer, "norm")
    ]
    parts = [part for module in modules for part in vars(module).values()]
    parts += [operation for part in parts if isinstance(part, Chain) for operation in part.operations]
    return [*(part for part in parts if isinstance(part, Norm)), *gated]


@pytest.mark.parametrize("name", NAMES)
def test_rounds_where_transformers_rounds(name: str, prefix: str, tmp_path: Path) -> None:
    import transformers

    case = CASES[name]._replace(dtype=torch.bfloat16, shard="5GB")
    directory = write(case, tmp_path / "theirs")
    config = from_dict(
        {
            "run": {"dir": str(tmp_path), "name": "run"},
            "model": hf_shape(str(directory)) | {"init_from": f"hf:{directory}", "from_hf": str(directory)},
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": 24},
            "train": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "precision": "bf16"},
            "checkpoint": {"load": "none"},
        }
    )
    trainer = Trainer(config, make_mesh(config))
    ours = norms_of(trainer)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    compared = set()
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    with torch.no_grad():
        for module in model.modules():
            if "RMSNorm" not in type(module).__name__:
                continue
            weight = module.weight.bfloat16()
            # the channels of queries and keys may have another order
            order = weight.argsort(stable=True)
            own = next(each for each in ours if torch.equal(each.weight.tensor.flatten().sort()[0], weight[order]))
            places = torch.empty_like(order).index_copy_(0, own.weight.tensor.flatten().argsort(stable=True), order)
            x, z = random(ROWS, 1, len(weight)), random(ROWS, 1, len(weight))
            if isinstance(own, GatedNorm):
                expected, (result, _) = module(x, z), own.forward(x[..., places], z[..., places])
            else:
                expected, result = module(x), own.compute(x[..., places], [])
            assert result.dtype == expected.dtype == torch.bfloat16
            assert (result != expected[..., places]).float().mean() < 0.01, type(module)  # but for the order of a sum
            compared.add(type(own))
    trainer.close()
    assert compared and (GatedNorm in compared) == (name in GATED)
