"""Generation with blocks that keep a state (delta rule, Kimi's decay by channel, Mamba-2, short convolution).

Against the same model without a cache, in fp64, and under every layout. Prompts have unequal lengths: a single token,
fewer tokens than a convolution reads, and more than one chunk of the recurrence.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.generation.language_model import LanguageModel
from tests.commands.jobs import continued
from tests.support.configs import case_of, config_of, write_tokens
from tests.support.jobs_training import train_and_save
from tests.support.pool import RankContext

LENGTHS = (70, 1, 2, 19)
COUNT = 8
CHUNK = 3  # positions of prompts: fewer than a convolution reads, and than a chunk of the recurrence
LONGEST = 80
BEYOND = LONGEST - max(LENGTHS) + 4  # tokens, with the last of which the longest row is read again
DELTA = {"linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
MODELS: dict[str, dict[str, Any]] = {
    "delta and convolution": {
        **DELTA,
        "layer_blocks": [
            "delta+feed_forward",
            "attention+feed_forward",
            "convolution+feed_forward",
            "delta+feed_forward",
        ],
        "linear_num_key_heads": 1,
        "conv_bias": True,
    },
    "kimi": {
        **DELTA,
        "layer_blocks": ["delta+feed_forward"] * 3 + ["attention+feed_forward"],
        "linear_num_key_heads": 4,
        "delta_decay": "channel",
    },
    "mamba": {
        "layer_blocks": ["mamba", "mamba|attention+feed_forward", "mamba+feed_forward", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 5,
        "mamba_state_size": 6,
        "mamba_n_groups": 1,
    },
}
LAYOUTS = [{"tp": 2, "pp": 2}, {"cp": 2}]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    prefix = write_tokens(tmp_path_factory.mktemp("data"), 96)
    case = case_of(tied=False, kv_heads=2, vocab_size=96, layers=4, masked=True, dropout=0.0, precision="fp64")
    saved = {}
    for number, (name, model) in enumerate(MODELS.items()):
        own = {**model, "initializer_range": 0.2, "max_position_embeddings": LONGEST}
        config = config_of(case, prefix, "fp64", model=own)
        config["run"]["name"] = f"states {number}"
        saved[name] = train_and_save(RankContext(0, 1), config, 2, 0)["directory"]
    return saved


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.randint(96, (length,), generator=numbers).tolist() for length in LENGTHS]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_without_a_cache(name, sources, prompts):
    """Also of rows that are read into a cache that has been used, in chunks."""
    model = LanguageModel(sources[name], precision="fp64")
    cache = model.new_cache(len(LENGTHS), LONGEST)
    for rows in (list(map(list, prompts)), [list(prompt) for prompt in reversed(prompts)]):
        model.prefill_chunk_size = None if rows[0] == prompts[0] else CHUNK
        logits = model.read(cache, rows)
        for step in range(COUNT):
            for row, tokens in enumerate(rows):
                alone = model.logits([tokens])
                assert logits is not None and alone is not None
                assert logits[row].allclose(alone[-1, 0], rtol=0, atol=1e-12)
                tokens.append((step * 7 + row) % 96)
            logits = model.extend(cache, [tokens[-1] for tokens in rows], [len(tokens) - 1 for tokens in rows])


def test_a_row_goes_on_only_after_its_last_token(sources, prompts):
    model = LanguageModel(sources["kimi"])
    cache = model.new_cache(len(LENGTHS), LONGEST)
    model.read(cache, prompts)
    model.extend(cache, [1] * len(LENGTHS), list(LENGTHS))
    with pytest.raises(ValueError, match="next position of each row"):
        model.extend(cache, [1] * len(LENGTHS), list(LENGTHS))


@pytest.fixture(scope="module")
def alone(sources, prompts) -> list[dict[str, Any]]:
    """What one process makes of the prompts with each model."""
    return continued(RankContext(0, 1), list(sources.values()), {}, prompts, BEYOND)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_says_the_same(layout, sources, prompts, alone, ranks):
    """Greedy tokens, drawn ones after prompts in chunks, beyond the context of the longest row, and
    log-probabilities."""
    job = continued, list(sources.values()), layout, prompts, BEYOND, CHUNK
    for results in ranks.run(math.prod(layout.values()), *job):
        for got, expected in zip(results, alone, strict=True):
            assert got["read"] is None or got["read"].allclose(expected["read"], rtol=0, atol=1e-5)
            assert got["greedy"] == expected["greedy"]
            assert got["drawn"] == expected["drawn"] != expected["greedy"]
            assert got["likely"][0].allclose(expected["likely"][0], rtol=0, atol=1e-5)
            assert got["answer"] == pytest.approx(expected["answer"], abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_row_keeps_does_not_grow(name, sources):
    blocks = MODELS[name]["layer_blocks"]
    model = LanguageModel(sources[name])
    short, long = (model.new_cache(3, capacity).nbytes for capacity in (32, 33))
    attention = sum("attention" in block for block in blocks)
    assert long - short == attention * 2 * 3 * 2 * 8 * 4  # keys and values of 2 heads of width 8 in fp32
