"""Models and tokenizers whose GGUF files are read by llama.cpp: the shapes of `hf_models` that it computes, and some
that it computes where those of `hf_models` have more than it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megalite.data.tokenizer.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    train_sentencepiece,
)
from megalite.gguf.pretokenizers import PRETOKENIZERS
from megalite.huggingface.tokenizer_json import converted
from tests.gguf.texts import TRAINING
from tests.huggingface import hf_models as hf
from tests.huggingface.hf_models import SIZES, TIED, UNTIED, Case

TOKENS = 24
WINDOW = {"sliding_window": 13}
THREE_LOCAL = ["sliding_attention"] * 3 + ["full_attention"]
THREE_DELTA = ["linear_attention"] * 3 + ["full_attention"]
DELTA = hf.DELTA | {"linear_value_head_dim": 8, "head_dim": 16, "layer_types": THREE_DELTA, "num_hidden_layers": 4}
WITHOUT_MLP = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
MIXERS = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]}
DENSE_MIXERS = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]}
ONE_SHARE = {
    "rope_parameters": {"full_attention": hf.SHARES[0], "sliding_attention": hf.SHARES[0] | {"rope_theta": 50.0}}
}
ONE_EPSILON = {"rms_norm_eps": 1e-6}  # that of latents and of keys of delta blocks in transformers
FACTORS = {f"{name}_multiplier": factor for name, factor in hf.FALCON_H1_FACTORS.items()}
FACTORS |= {"mlp_multipliers": [0.5, 1.5], "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.8]}
GATE_FIRST = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
ALL_HEADS = {"num_key_value_heads": 4}

_AS_THERE = [
    *("llama, one key-value head", "llama, tied, llama3 rope", "llama, linear rope", "llama, yarn rope"),
    *("llama, biases, head_dim", "qwen2, tied", "qwen3, yarn rope", "olmo2", "phi3", "phi3, longrope"),
    *("stablelm, norms of each head", "stablelm, parallel, biases", "glm", "glm4, one key-value head", "cohere"),
    *("arcee", "seed_oss", "ernie4_5", "jais2", "hunyuan_v1_dense", "hunyuan_v1_moe", "apertus", "mixtral"),
    *("qwen3_moe", "deepseek_v3", "mistral4", "youtu", "gpt_oss", "glm4_moe, groups, tied", "solar_open"),
    *("granite, biases", "bamba", "granitemoehybrid", "granitemoehybrid, tied, dense, rope"),
    *("lfm2", "lfm2_moe", "granitemoe", "granitemoeshared, tied, biases", "minimax_m2", "ernie4_5_moe"),
]
_WITHOUT_WINDOWS = ("mistral, window", "qwen2_moe, windows", "ministral", "ministral3", "gelu: starcoder2")
_WITH_WINDOW = ["mistral, window", "qwen2_moe, windows", "olmo3", "cohere2", "ministral3"]
_OF_GELU = {
    "gelu: gpt2": "gpt2, untied, narrow",
    "gelu: gemma": "gemma, one key-value head",
    "gelu: gemma2": "gemma2",
    "gelu: gemma3": "gemma3",
    "gelu: gpt_neox": "gpt_neox",
    "gelu: falcon": "falcon, new architecture, one norm",
}
_OTHERS = {
    "gelu: starcoder2": Case("Starcoder2", SIZES | TIED | WINDOW),
    "ministral": Case("Ministral", SIZES | UNTIED | WINDOW | {"head_dim": 8}),
    "nemotron, biases": Case("Nemotron", SIZES | TIED | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": Case("SmolLM3", SIZES | TIED | {"num_hidden_layers": 5}),
    "olmoe": Case("Olmoe", SIZES | UNTIED | hf.EXPERTS | ALL_HEADS | {"num_experts": 6}),
    "dots1": Case("Dots1", SIZES | UNTIED | hf.DOTS | ALL_HEADS | {"sliding_window": None, "max_window_layers": 3}),
    "deepseek_v2": Case(
        "DeepseekV2", hf.LATENT | TIED | {"q_lora_rank": None, "rope_parameters": hf.MSCALE, "num_hidden_layers": 26}
    ),
    "glm4_moe_lite": Case("Glm4MoeLite", hf.FROM_LATENTS | UNTIED | hf.GROUPS | ONE_EPSILON | {"q_lora_rank": 12}),
    "exaone4, windows": Case(
        "Exaone4", SIZES | UNTIED | WINDOW | {"layer_types": THREE_LOCAL * 16, "num_hidden_layers": 64}
    ),
    "exaone_moe": Case("ExaoneMoe", SIZES | UNTIED | hf.EXAONE_MOE | hf.GROUPS | WINDOW | {"layer_types": hf.MIXED}),
    "mimo_v2_flash": Case("MiMoV2Flash", SIZES | UNTIED | hf.MIMO | ONE_SHARE),
    "afmoe": Case("Afmoe", SIZES | UNTIED | hf.AFMOE | {"layer_types": THREE_LOCAL, "num_hidden_layers": 4}),
    "falcon_h1, norm, factors": Case(
        "FalconH1",
        SIZES
        | TIED
        | hf.FALCON_H1
        | FACTORS
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 12},
    ),
    "nemotron_h, experts": Case("NemotronH", hf.NEMOTRON | UNTIED | MIXERS | {"moe_latent_size": 20}),
    "nemotron_h, dense": Case("NemotronH", hf.NEMOTRON | UNTIED | DENSE_MIXERS),
    "granitemoehybrid, attention alone": Case(
        "GraniteMoeHybrid",
        SIZES
        | TIED
        | hf.MAMBA
        | {"layer_types": ["full_attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 40}
        | {"position_embedding_type": "rope"},
    ),
    "delta: qwen3_next": Case("Qwen3Next", SIZES | UNTIED | hf.NARROW | hf.SHARED | DELTA),
    "delta: qwen3_5_text": Case("Qwen3_5Text", SIZES | UNTIED | DELTA | {"rope_parameters": hf.MROPE}),
    "delta: qwen3_5_moe_text": Case(
        "Qwen3_5MoeText", WITHOUT_MLP | TIED | hf.NARROW | hf.SHARED | DELTA | {"rope_parameters": hf.MROPE}
    ),
    "delta: kimi_linear": Case("KimiLinear", hf.KIMI | UNTIED | ONE_EPSILON),
}
CASES = {name: hf.CASES[name]._replace(shard="5GB") for name in _AS_THERE}
CASES |= {name: Case(hf.CASES[name].family, hf.CASES[name].fields | WINDOW) for name in _WITH_WINDOW}
CASES |= {name: hf.CASES[theirs] for name, theirs in _OF_GELU.items()} | _OTHERS
"""Name → the model. llama.cpp computes those with `gelu` or `delta` in their names less exactly."""
CASES = {name: case._replace(dtype=torch.float32) for name, case in CASES.items()}


def compared(name: str) -> int:
    """The number of positions that llama.cpp computes: the window, where it has no windows."""
    return WINDOW["sliding_window"] if name in _WITHOUT_WINDOWS else TOKENS


class ExportedTokenizer(NamedTuple):
    """A tokenizer: what --tokenizer names, the number of its ids, and how it encodes a text."""

    path: Path | str
    size: int
    encode: Callable[[str], Sequence[int]]

    def model(self, directory: Path) -> Path:
        """A model with some ids more than the tokenizer."""
        sizes = SIZES | TIED | {"num_hidden_layers": 1, "vocab_size": self.size + 7}
        return hf.write(Case("Llama", sizes), directory)


def tokenizers(directory: Path) -> dict[str, ExportedTokenizer]:
    """Name → a tokenizer of each kind, trained on the text of many scripts."""
    kinds = {name: _byte_level(name, directory / name) for name in PRETOKENIZERS}
    kinds["byte"] = ExportedTokenizer("byte", ByteTokenizer().vocab_size, ByteTokenizer().encode)
    path = directory / "trained.model"
    train_sentencepiece(TRAINING, 700, path)
    trained = SentencePieceTokenizer(path)
    kinds["sentencepiece"] = ExportedTokenizer(path, trained.vocab_size, trained.encode)
    files = converted(trained)
    kinds["sentencepiece, tokenizer.json"] = _directory(directory / "json", files)
    token = {"id": trained.vocab_size, "content": "<tool>", "special": False, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    files["tokenizer.json"]["added_tokens"].append(token)
    kinds["added"] = _directory(directory / "added", files)
    (directory / "added" / "tokenizer.model").write_bytes(path.read_bytes())
    return kinds


def _directory(directory: Path, files: dict[str, object]) -> ExportedTokenizer:
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    read = HuggingFaceTokenizer(directory)
    return ExportedTokenizer(directory, read.vocab_size, read.encode)


def _byte_level(name: str, directory: Path) -> ExportedTokenizer:
    """A byte-level tokenizer with one of llama.cpp's pre-tokenizers."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    rules, steps = PRETOKENIZERS[name], []
    for pattern in rules.patterns:
        if pattern == "digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif pattern != "bytes":
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.patterns[-1] == "bytes"))
    tokenizer = Tokenizer(models.BPE(ignore_merges=rules.ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    settings = {"eos_token": special[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    return _directory(directory, {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": settings})
