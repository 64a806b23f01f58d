"""torchtitan's Llama 3 comes in as the same model does from Hugging Face, with the state of AdamW."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalite.checkpoint import manifest_of
from megalite.checkpoint.inspect import whole
from megalite.commands import convert

HEADS, KV_HEADS, HIDDEN = 4, 2, 32


def of_torchtitan(weights: dict[str, Tensor], later: bool) -> dict[str, Tensor]:
    """Names and order of torchtitan: queries and keys with the pairs of rotary channels next to each other."""
    head = "lm_head" if later else "output"
    names = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": head}
    names |= {
        f"model.layers.{layer}.{module}": f"layers.{layer}.{ours}"
        for layer in range(2)
        for module, ours in {
            **{f"self_attn.{part}_proj": f"attention.{'qkv_linear.' if later else ''}w{part}" for part in "qkv"},
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        }.items()
    }
    theirs = {}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if module.endswith(part):
                size = values.shape[0] // heads // 2
                values = values.view(heads, 2, size, -1).transpose(1, 2).reshape(values.shape)
        theirs[f"{names[module]}.weight"] = values.contiguous()
    return theirs


@pytest.mark.parametrize("later", [False, True], ids=["earlier names", "later names"])
def test_weights_and_moments_are_those_of_the_same_model_from_hugging_face(tmp_path: Path, later: bool) -> None:
    import transformers

    shape = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "tie_word_embeddings": False}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model.save_pretrained(tmp_path / "hf")
    weights = of_torchtitan(model.state_dict(), later)
    state: dict[str, object] = dict(weights)
    state["optimizer"] = {f"state.{name}.exp_avg": 2 * values for name, values in weights.items()}
    state["optimizer"] |= {f"state.{name}.exp_avg_sq": values**2 for name, values in weights.items()}  # type: ignore[operator]
    state["optimizer"] |= {f"state.{name}.step": torch.tensor(5.0) for name in weights}  # type: ignore[operator]
    state["train_state"] = {"step": 5, "ntokens_seen": 100}
    state["lr_scheduler"] = {"last_epoch": 5}
    dcp.save(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    assert convert.main(["import", str(tmp_path / "hf"), str(tmp_path / "from-hf")]) == 0
    given = ["--model", str(tmp_path / "hf/config.json")]
    assert convert.main(["import", f"torchtitan:{tmp_path / 'titan'}", str(tmp_path / "in"), *given]) == 0
    expected, imported = manifest_of(tmp_path / "from-hf"), manifest_of(tmp_path / "in")
    assert imported.state["step"] == 5 and len(imported.tensors) == 3 * len(expected.tensors)
    for name, tensor in expected.tensors.items():
        values = torch.from_numpy(whole(expected, tensor)).view(torch.float32)
        for kind, changed in (("weight", values), ("exp_avg", 2 * values), ("exp_avg_sq", values**2)):
            stored = imported.tensors[name.replace("weight/", f"{kind}/", 1)]
            assert torch.equal(torch.from_numpy(whole(imported, stored)).view(torch.float32), changed), (name, kind)


def test_another_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"tok_embeddings.weight": torch.zeros(40, 32)}, checkpoint_id=tmp_path / "t", no_dist=True)
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "vocab_size": 40}))
    name, out = f"torchtitan:{tmp_path / 't'}", str(tmp_path / "out")
    for more, message in (
        ([], "does not say what its model is"),
        (["--model", str(tmp_path / "config.json")], "norm.weight is missing"),
        (["--drop_padding"], "--drop_padding applies to megatron:DIR only"),
        (["--drop_mtp"], "--drop_mtp applies to megatron:DIR and Hugging Face directories only"),
    ):
        with pytest.raises(SystemExit):
            convert.main(["import", name, out, *more])
        assert message in capsys.readouterr().err
