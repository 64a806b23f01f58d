"""A run goes out to Megatron-LM and comes back: the same tensors, and the same next step.

What megatron-core itself writes and reads is in tests/components/test_megatron.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megalite.assembly import parts as build
from megalite.checkpoint import manifest_of
from megalite.checkpoint.inspect import differences
from megalite.commands import convert
from megalite.config.load import from_dict
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 90, "layers": 4, "masked": False, "dropout": 0.0}
LATENTS = {
    **{"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0], "router_scores": "sigmoid"},
    **{"router_balance": "bias", "shared_expert_intermediate_size": 16, "shared_expert_gate": False},
    **{"num_key_value_heads": None},
}
GPT = {
    **{"position": "learned", "norm": "layer", "hidden_act": "gelu_pytorch_tanh", "gated_mlp": False},
    **{"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}
MAMBA = {
    **{"layer_blocks": ["mamba", "attention", "mamba", "feed_forward"], "position": "none"},
    **{"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_state_size": 6, "mamba_n_groups": 2},
}
DELTA = {
    **{"layer_blocks": ["delta+feed_forward", "attention+mixture"] * 2, "attention_gate": True, "qk_norm": "head"},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "partial_rotary_factor": 0.5, "num_experts": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16},
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads, partial rope": {"partial_rotary_factor": 0.5},
    "gpt, tied": GPT,
    "latents, experts with a bias": LATENTS,
    "mamba": MAMBA,
    "delta, gated attention, experts": DELTA,
}
FORMS = {
    "torch_dist": ["--format", "megatron"],
    "legacy": ["--format", "megatron-legacy", "--tp", "2", "--pp", "2"],
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), CASE["vocab_size"])


def trainer_of(prefix: str, model: dict[str, Any], precision: str, **changes: dict[str, Any]) -> Trainer:
    config = config_of(CASE, prefix, precision, model={**model, "initializer_range": 0.2}, **changes)
    config["train"] |= {"global_batch_size": 2, "micro_batch_size": 2}
    parsed = from_dict(config)
    return Trainer(parsed, build.make_mesh(parsed))


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    return global_tensors(trainer, ("weight", "exp_avg", "exp_avg_sq"))


def command(*arguments: Path | str) -> int:
    return convert.main([str(each) for each in arguments])


def saved(prefix: str, model: dict[str, Any], precision: str, directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint after two steps, and the tensors after the third."""
    run = {"dir": str(directory), "name": "run"}
    trainer = trainer_of(prefix, model, precision, run=run)
    for _ in range(2):
        trainer.step()
    trainer.save()
    trainer.step()
    expected = tensors_of(trainer)
    trainer.close()
    return directory / "run/checkpoints/step_00000002", expected


@pytest.mark.parametrize("name", MODELS)
def test_the_next_step_is_the_same(prefix: str, tmp_path: Path, name: str) -> None:
    checkpoint, expected = saved(prefix, MODELS[name], "fp64", tmp_path)
    for form, options in FORMS.items():
        theirs, back = tmp_path / form, tmp_path / f"back-{form}"
        assert command("export", checkpoint, theirs, *options) == 0
        model = ["--model", checkpoint, "--drop_padding"]
        assert command("import", f"megatron:{theirs}", back, *model) == 0
        changed = [each.tensor for each in differences(manifest_of(checkpoint), manifest_of(back))]
        # biases of routers are fp32 there, and the load of the last step is not stored
        assert [each for each in changed if not each.startswith("router/")] == []
        options = {"load": str(back), "allow": ["data"]}
        run = {"dir": str(tmp_path), "name": form}
        resumed = trainer_of(prefix, MODELS[name], "fp64", run=run, checkpoint=options)
        assert resumed.step_done == 2
        resumed.step()
        again = tensors_of(resumed)
        resumed.close()
        for tensor, values in expected.items():
            error = (again[tensor][: len(values)] - values).abs().max()
            assert error <= 1e-9 * max(1.0, values.abs().max().item()), (form, tensor)
