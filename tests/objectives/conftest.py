"""A small model with a tokenizer, and pairs of completions, for the tests beside other trainers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.data.indexed import IndexedTokens
from tests.support.preferences import EOS, VOCAB, write_preferences

LENGTHS = [(3, 4, 5), (2, 6, 3), (5, 2, 2), (4, 4, 7), (3, 3, 3), (1, 5, 2)]
SIZES = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a word-level tokenizer, whose words are token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        **SIZES, vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2,
        eos_token_id=EOS, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(directory)
    words = ["</s>", *map(str, range(1, VOCAB - 1)), "<pad>"]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(VOCAB), strict=True)), unk_token="1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_preferences(tmp_path_factory.mktemp("data") / "x", LENGTHS)


def documents_of(prefix: str) -> list[list[int]]:
    """The tokens of each document."""
    tokens = IndexedTokens(prefix)
    ends = np.cumsum(tokens.sizes)
    return [tokens.tokens[end - size : end].tolist() for end, size in zip(ends, tokens.sizes, strict=True)]
