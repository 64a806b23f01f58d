"""Maximal update parametrization: its steps are those of torch's AdamW with a group for each rate, every layout is one
process, the base is the plain model bit for bit, and exports compute the same logits without it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megalite.assembly.parts import make_mesh
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.huggingface.convert import export_model, import_model
from megalite.model.parameters import model_specs
from megalite.training.coordinates import check_coordinates
from megalite.training.trainer import Trainer
from tests.support import jobs
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.layouts import Case

STEPS, WIDTH, VOCABULARY = 3, 32, 101
CASE: Case = {**SINGLE, "tied": False, "kv_heads": 4, "vocab_size": VOCABULARY, "layers": 2, "masked": False}
CASE |= {"dropout": 0.0}
MUP = {"base_width": 8, "base_depth": 1}

MODELS: dict[str, dict[str, Any]] = {
    "llama, fixed key-value heads": {"num_key_value_heads": 2, "mup": {**MUP, "num_key_value_heads": 2}},
    "tied, mtp, norms of outputs": {
        "tie_word_embeddings": True,
        "mtp_layers": 1,
        "norm_placement": "both",
        "mup": {"base_width": 16, "base_depth": 1},
    },
    "latents, experts": {
        **{"num_attention_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 6},
        **{"qk_rope_head_dim": 4, "v_head_dim": 6, "num_experts": 4, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16, "num_key_value_heads": None, "mup": MUP},
    },
    "delta, mamba": {
        "layer_blocks": ["delta+feed_forward", "mamba+feed_forward"],
        **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_n_groups": 2},
        **{"mamba_state_size": 8, "mup": MUP},
    },
}
LAYOUTS: dict[str, Case] = {
    "tp2, dp2, zero 3": {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 3},
    "pp2, dp2, zero 2": {"pp": 2, "dp": 2, "zero": 2, "microbatches": 2},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), VOCABULARY)


def configured(prefix: str, model: dict[str, Any], layout: Case | None = None, name: str = "adamw") -> dict[str, Any]:
    config = config_of({**CASE, **(layout or {})}, prefix, "fp64", model={})
    config["model"] |= model
    config["optimizer"] |= {"name": name, "lr": 1e-2, "eps": 1e-12}
    return config | ({"muon": {"lr": 0.02, "ns_dtype": "compute"}} if name == "muon" else {})


@pytest.mark.parametrize(
    ("model", "layout", "optimizer"),
    [*product(MODELS, LAYOUTS, ["adamw"]), *product(MODELS, ["pp2, dp2, zero 2"], ["muon"])],
)
def test_a_layout_is_one_process(model, layout, optimizer, ranks, references, prefix):
    case = {**CASE, **LAYOUTS[layout]}
    config = configured(prefix, MODELS[model], LAYOUTS[layout], optimizer)
    alone = configured(prefix, MODELS[model], None, optimizer)
    batch = config["train"]["global_batch_size"]
    alone["train"] |= {"global_batch_size": batch, "micro_batch_size": batch}
    got = ranks.run(case["tp"] * case["pp"] * case["dp"], jobs.train, config, STEPS)[0]
    expected = references.run(jobs.train, alone, STEPS)
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
    for name, value in got["tensors"].items():
        assert (value - expected["tensors"][name]).abs().max() <= 1e-9, name


def test_a_base_of_the_same_size_is_the_plain_model_bit_for_bit(references, prefix):
    own = {"base_width": WIDTH, "base_depth": 2}
    for optimizer in ("adamw", "muon"):
        plain, base = (
            references.run(jobs.train, configured(prefix, {"mup": mup}, None, optimizer), STEPS) for mup in (None, own)
        )
        assert plain["losses"] == base["losses"]
        assert all(torch.equal(value, base["tensors"][name]) for name, value in plain["tensors"].items())


def exported(trainer: Trainer, directory: Any) -> Any:
    export_model(trainer.save(), directory, tokenizer=None)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


def test_steps_are_those_of_adamw_with_groups_on_the_exported_model(tmp_path, prefix):
    """Exported, the model has no multipliers: the head is divided by the growth m of the width, and the last matrices
    of blocks by that of the depth. What they compute changes by as much if rate and epsilon are divided, too."""
    model = MODELS["llama, fixed key-value heads"]
    options = configured(prefix, model)
    options["run"] = {"dir": str(tmp_path), "name": "run"}
    options["train"] |= {"grad_clip": 0.0}
    options["optimizer"] |= {"warmup_steps": 0, "decay": "constant", "eps": 1e-30, "weight_decay": 0.1}
    config = from_dict(options)
    trainer = Trainer(config, make_mesh(config))
    theirs = exported(trainer, tmp_path / "start")
    m, depth = WIDTH / MUP["base_width"], 2.0
    head, last = ("lm_head",), ("o_proj", "down_proj")
    groups = []
    for name, value in theirs.named_parameters():
        module = name.split(".")[-2]
        rate = 1.0 if value.dim() == 1 or module == "embed_tokens" else 1 / m
        rate /= depth if module in last else 1.0
        decay = 0.0 if value.dim() == 1 else 0.1
        groups.append({"params": [value], "lr": 1e-2 * rate, "weight_decay": decay / rate})
    assert {name.split(".")[-2] for name, _ in theirs.named_parameters()} >= {*head, *last}
    adamw = torch.optim.AdamW(groups, betas=tuple(config.optimizer.betas), eps=1e-30, fused=False)
    for _ in range(STEPS):
        microbatch = trainer.loader.step(trainer.samples)[0]
        trainer.step()
        logits = theirs(input_ids=microbatch.tokens.T, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), microbatch.targets.T.flatten()).backward()
        adamw.step()
        adamw.zero_grad()
    ours = exported(trainer, tmp_path / "end")
    trainer.close()
    for (name, own), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (own - other).abs().max() <= 1e-6, name  # of changes of 1e-2; transformers' norms are in fp32


def test_a_tied_head_is_exported_to_a_family_with_a_logit_scale(tmp_path, prefix):
    options = configured(prefix, {"tie_word_embeddings": True, "mup": MUP})
    options["run"] = {"dir": str(tmp_path), "name": "run"}
    config = from_dict(options)
    trainer = Trainer(config, make_mesh(config))
    theirs = exported(trainer, tmp_path / "hf")
    assert theirs.config.model_type == "granite" and theirs.config.logits_scaling == WIDTH / MUP["base_width"]
    (stage,) = trainer.parts.stages.values()
    microbatch = trainer.loader.step(0)[0]
    with torch.no_grad():
        state = stage.forward_state(microbatch, step=0, training=False)
        own = stage.logits(microbatch.tokens, state)[..., :VOCABULARY].transpose(0, 1)
        assert (own - theirs(input_ids=microbatch.tokens.T).logits).abs().max() <= 1e-6  # fp32 norms
    trainer.close()


def test_the_heads_of_mtp_modules_are_divided_as_the_head_is(tmp_path, prefix):
    """Files have a copy of the head in each module: an import demands that they are equal."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    options = configured(prefix, {"mtp_layers": 1, "router_balance": "bias", "router_scores": "sigmoid", **sizes})
    options["model"] |= {"shared_expert_intermediate_size": 16, "shared_expert_gate": False, "mup": MUP}
    options["run"] = {"dir": str(tmp_path), "name": "run"}
    config = from_dict(options)
    trainer = Trainer(config, make_mesh(config))
    export_model(trainer.save(), tmp_path / "hf", tokenizer=None, family="glm4_moe")
    trainer.close()
    import_model(tmp_path / "hf", tmp_path / "again")


@pytest.mark.parametrize("mup", [None, {"base_width": 16}])
def test_weights_with_other_factors_are_no_start(mup, tmp_path, prefix):
    options = configured(prefix, {"mup": MUP})
    options["run"] = {"dir": str(tmp_path), "name": "run"}
    config = from_dict(options)
    trainer = Trainer(config, make_mesh(config))
    start = trainer.save()
    trainer.close()
    options["model"] |= {"mup": mup, "init_from": str(start)}
    options["run"]["name"] = "other"
    with pytest.raises(ConfigError, match="does not match model.init_from"):
        Trainer(from_dict(options), make_mesh(from_dict(options)))


def coordinates(prefix: str, **model: Any) -> list[Any]:
    config = configured(prefix, {"num_key_value_heads": 4, "intermediate_size": 64, **model})
    config["optimizer"] |= {"lr": 3e-3}
    config["train"] |= {"global_batch_size": 4, "micro_batch_size": 4}
    return check_coordinates(from_dict(config), [32, 64, 128], steps=4, seeds=3)


def test_only_with_mup_activations_move_alike_at_every_width(prefix):
    experts = {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [1]}
    kept = coordinates(prefix, mup={"base_width": 32}, **experts)
    plain = coordinates(prefix, **experts)
    names = {each.name for each in kept}
    assert {"layers.1.attention", "layers.1.attention, scores", "layers.1.mlp", "logits"} <= names
    assert "layers.0.mlp, router" in names
    largest, smallest = (max(each.exponent(4) for each in activations) for activations in (kept, plain))
    assert largest <= 0.25 and smallest >= 0.5, (largest, smallest)


def test_growth_is_that_of_whole_matrices_under_tp():
    model = config_model({"num_key_value_heads": 2, "mup": {**MUP, "num_key_value_heads": 2}})
    one, two = (
        {segment.name: segment for spec in model_specs(model, tp=tp) for segment in spec.segments} for tp in (1, 2)
    )
    assert {name: (each.growth, each.init_std) for name, each in one.items()} == {
        name: (each.growth, each.init_std) for name, each in two.items()
    }
    assert one["layers.0.attention.k.weight"].growth == (1.0, 4.0)


def config_model(model: dict[str, Any]) -> Any:
    config: Config = from_dict({"model": {"vocab_size": 16, "hidden_size": WIDTH, "num_hidden_layers": 2, **model}})
    return replace(config.model)
