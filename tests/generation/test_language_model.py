"""Generation: cached logits and tokens against transformers, under every layout, in batches; draws; and text piece by
piece."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megalite_kernels.index_scores import select
from torch import Tensor

from megalite.config.load import from_dict
from megalite.data.tokenizer.tokenizers import ByteTokenizer
from megalite.generation.language_model import LanguageModel, Sampling
from megalite.generation.sampling import draw, uniform
from megalite.generation.sources import end_tokens, for_inference, open_source
from megalite.generation.text import Reply
from megalite.model.row_cache import RowCache
from tests.commands.jobs import continued
from tests.huggingface.hf_models import CASES, VOCAB, greedy, load, random_ids, tolerance, write
from tests.support.pool import RankContext, RankPool

COUNT = 12  # tokens: more than any window
LENGTHS = (3, 19, 9)  # of prompts side by side: shorter and longer than windows
CHUNK = 4  # positions of prompts
TIELESS = random_ids(1, 22)[0].tolist()
SPREAD = [
    "llama, one key-value head",
    "gemma2, caps that act",
    "qwen3, tied",
    "gpt2",
    "qwen2_moe, a dense layer",
]  # one key-value head is held by both tp ranks
NAMES = [
    *SPREAD,
    "llama, yarn rope",
    "mistral, window",
    "qwen2, tied",
    "gemma",
    "arcee",
    "olmo2",
    "smollm3, windows",
    "phi3, partial rope, window",
    "starcoder2, window",
    "granite",
    "nemotron",
]
NAMES += [
    "stablelm, parallel, biases",
    "gpt_neox",
    "olmo3, yarn rope",
    "gemma3",
    "glm",
    "glm4",
    "cohere, norms of each head",
    "cohere2",
]
NAMES += ["seed_oss", "ernie4_5", "jais2", "hunyuan_v1_dense", "hunyuan_v1_moe", "nanochat", "apertus"]
NAMES += ["falcon, one key-value head", "falcon, new architecture", "ministral, some windows"]
NAMES += [
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
]
NAMES += ["dots1", "solar_open", "exaone4", "exaone_moe", "ministral3", "glm4_moe_lite", "youtu", "mistral4"]
NAMES += ["granitemoe", "granitemoeshared, tied, biases", "flex_olmo", "minimax_m2", "ernie4_5_moe", "hy_v3", "afmoe"]
NAMES += ["cohere2_moe, sigmoid, RMSNorm, sums"]
NAMES += ["mixtral", "olmoe", "qwen3_moe", "deepseek_v2, lite, yarn rope", "deepseek_v3", "gpt_oss", "glm4_moe"]
NAMES += ["mimo_v2_flash", "laguna"]
NAMES += ["deepseek_v32", "glm_moe_dsa"]
LAYOUTS = [{"tp": 2, "pp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [row[:length] for row, length in zip(random_ids(len(LENGTHS)).tolist(), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """hf:DIR of each of `NAMES`, in fp32."""
    place = tmp_path_factory.mktemp("models")
    return {
        name: f"hf:{write(CASES[name]._replace(dtype=torch.float32), place / str(i))}" for i, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def alone(sources: dict[str, str], prompts: list[list[int]]) -> list[dict]:
    """What one process makes of the prompts with each model of `SPREAD`."""
    return continued(RankContext(0, 1), [sources[name] for name in SPREAD], {}, prompts, COUNT)


def places(cache: RowCache) -> list[int]:
    return [tensor.data_ptr() for kept in cache.stores.values() for tensor in kept if tensor is not None]


def steps(model: LanguageModel, rows: list[list[int]], tokens: list[list[int]]) -> Tensor:
    """Logits of each step, [count, rows, vocabulary], when `tokens` follow the rows."""
    cache = model.new_cache(len(rows), max(map(len, rows)) + len(tokens))
    results = [model.read(cache, rows)]
    memory = places(cache)
    for step, following in enumerate(tokens[:-1]):
        results.append(model.extend(cache, following, [len(row) + step for row in rows]))
    assert memory == places(cache), "the cache was allocated again"
    assert not any(each.requires_grad for each in results)
    return torch.stack(results)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logits_are_those_of_transformers(
    name: str, sources: dict[str, str], prompts: list[list[int]]
) -> None:
    """Rows of unequal lengths side by side, against transformers on each alone; and the same logits without a cache,
    and of prompts that are read in chunks, into which windows, states and ends of rows do not fit."""
    model = LanguageModel(sources[name])
    tokens = list(model.continuations(prompts, COUNT, Sampling(temperature=0.0)))
    cached = steps(model, prompts, tokens)
    whole = model.logits([[*prompt, *(step[row] for step in tokens)] for row, prompt in enumerate(prompts)])
    assert whole is not None
    model.prefill_chunk_size = CHUNK
    assert (steps(model, prompts, tokens) - cached).abs().max() <= 1e-5
    theirs = load(sources[name].removeprefix("hf:"))
    for row, prompt in enumerate(prompts):
        their_tokens, their_logits = greedy(theirs, prompt, COUNT)
        assert [step[row] for step in tokens] == their_tokens
        assert (cached[:, row] - their_logits).abs().max() <= tolerance(name)
        assert (cached[:, row] - whole[len(prompt) - 1 : len(prompt) - 1 + COUNT, row]).abs().max() <= 1e-5


def test_longrope_has_the_factors_of_each_rows_length(tmp_path: Path) -> None:
    """transformers reads a row that grows beyond the original context again: all keys have the long factors then.
    Padding does not count, nor do other rows."""
    source = f"hf:{write(CASES['phi3, longrope']._replace(dtype=torch.float32), tmp_path / 'phi')}"
    model, theirs = LanguageModel(source), load(tmp_path / "phi")
    assert model.config.model.longrope_context == 16
    prompts = [row[:length] for row, length in zip(random_ids(4).tolist(), (3, 9, 16, 19), strict=True)]
    continuations = list(model.continuations(prompts, COUNT, Sampling(temperature=0.0)))
    expected = [greedy(theirs, prompt, COUNT) for prompt in prompts]
    assert [list(tokens) for tokens in zip(*continuations, strict=True)] == [tokens for tokens, _ in expected]
    for step in (0, 1, 7, 8, COUNT - 1):
        rows = [[*prompt, *tokens[:step]] for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
        read, logits = model.read(model.new_cache(len(rows), 40), rows), model.logits(rows)
        model.prefill_chunk_size = None if model.prefill_chunk_size else CHUNK
        assert read is not None and logits is not None
        for row, (_, their_logits) in enumerate(expected):
            assert (read[row] - their_logits[step]).abs().max() <= 1e-4
            assert (logits[len(rows[row]) - 1, row] - their_logits[step]).abs().max() <= 1e-4
    model.prefill_chunk_size = CHUNK  # a chunk is shorter than the original context, and its row is not
    read = model.read(model.new_cache(1, 40), rows[-1:])
    assert read is not None and (read[0] - expected[-1][1][COUNT - 1]).abs().max() <= 1e-4


def test_a_row_is_the_same_in_a_batch_as_alone(sources: dict[str, str], prompts: list[list[int]]) -> None:
    model = LanguageModel(sources["gemma2, caps that act"])
    tokens = [[5] * len(prompts), [7] * len(prompts), [11] * len(prompts)]
    together = steps(model, prompts, tokens)
    for row, prompt in enumerate(prompts):
        assert (together[:, [row]] - steps(model, [prompt], [each[:1] for each in tokens])).abs().max() <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_says_the_same(layout: dict[str, int], sources, prompts, alone, ranks: RankPool) -> None:
    """Greedy tokens on every rank, drawn ones and logits after prompts in chunks, and log-probabilities."""
    names = [sources[name] for name in SPREAD]
    for results in ranks.run(math.prod(layout.values()), continued, names, layout, prompts, COUNT, CHUNK):
        for got, expected in zip(results, alone, strict=True):
            assert got["greedy"] == expected["greedy"]
            assert got["drawn"] == expected["drawn"] != expected["greedy"]
            assert got["read"] is None or (got["read"] - expected["read"]).abs().max() <= 1e-5
            assert (got["likely"][0] - expected["likely"][0]).abs().max() <= 1e-5
            assert got["likely"][1].equal(expected["likely"][1])
            assert got["answer"] == pytest.approx(expected["answer"], abs=1e-5), (
                "one token, of which a cp rank has none"
            )


def test_latents_and_sinks_are_read_in_parts_too(sources, prompts, ranks: RankPool) -> None:
    """Parts of cp ranks, and chunks of prompts; in fp64."""
    names = ("deepseek_v3", "deepseek_v2, lite, yarn rope", "gpt_oss", "deepseek_v32", "glm_moe_dsa")
    names = [sources[name] for name in names]
    alone = continued(RankContext(0, 1), names, {}, prompts, COUNT, None, "fp64")
    for layout in ({"pp": 2}, {"cp": 2, "tp": 2}):
        for results in ranks.run(math.prod(layout.values()), continued, names, layout, prompts, COUNT, CHUNK, "fp64"):
            for got, expected in zip(results, alone, strict=True):
                assert got["greedy"] == expected["greedy"] and got["drawn"] == expected["drawn"]
                assert (got["likely"][0] - expected["likely"][0]).abs().max() <= 1e-12
                assert got["read"] is None or (got["read"] - expected["read"]).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_a_prompt_in_chunks_selects_the_same_rows(name: str, sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selections, and logits in fp64; tokens and logits of transformers, which reads it in the same chunks. Where
    scores tie it chooses by the length of a row, so that its own chunks differ: this prompt has no ties."""
    model, count = LanguageModel(sources[name], precision="fp64"), len(TIELESS)
    selections: list[Tensor] = []

    def recorded(*inputs: Tensor, **options: Any) -> Tensor:
        selections.append(select(*inputs, **options)[: options["positions"].max() + 1])
        return selections[-1]

    monkeypatch.setattr("megalite.model.blocks.indexed_attention.cache.select", recorded)
    whole = model.read(model.new_cache(1, count), [TIELESS])
    layers, expected = len(selections), torch.stack(selections)[:, :count]
    selections.clear()
    model.prefill_chunk_size = CHUNK
    chunked = model.read(model.new_cache(1, count), [TIELESS])
    assert whole is not None and chunked is not None
    assert (chunked - whole).abs().max() <= 1e-12
    parts = [torch.stack(selections[at : at + layers]) for at in range(0, len(selections), layers)]
    got = torch.cat(parts, 1)  # from the first chunk on whose end more rows are visible than are selected
    assert len(parts) == -(-count // CHUNK) - 1
    assert torch.equal(got[:, : count - CHUNK], expected[:, CHUNK:])
    theirs, single = load(sources[name].removeprefix("hf:")), LanguageModel(sources[name])
    single.prefill_chunk_size = CHUNK
    their_whole = greedy(theirs, TIELESS, COUNT)
    their_tokens, their_logits = greedy(theirs, TIELESS, COUNT, prefill_chunk_size=CHUNK)
    assert their_tokens == their_whole[0] and (their_logits - their_whole[1]).abs().max() <= 1e-5, "ties"
    tokens = list(single.continuations([TIELESS], COUNT, Sampling(temperature=0.0)))
    assert [token for (token,) in tokens] == their_tokens
    assert (steps(single, [TIELESS], tokens)[:, 0] - their_logits).abs().max() <= tolerance(name)


def test_log_probabilities_are_those_of_the_logits(
    sources: dict[str, str], prompts: list[list[int]], alone: list[dict]
) -> None:
    for name, results in zip(SPREAD, alone, strict=True):
        logits = LanguageModel(sources[name]).logits(prompts)
        assert logits is not None
        at = 0
        for row, tokens in enumerate(prompts):
            for position, token in enumerate(tokens[1:]):
                probabilities = torch.softmax(logits[position, row], 0)
                assert results["likely"][0][at].item() == pytest.approx(math.log(probabilities[token].item()), abs=1e-5)
                assert results["likely"][1][at].item() == (probabilities.argmax().item() == token)
                at += 1


def test_memory_is_the_window_and_the_precision_that_is_asked_for(sources: dict[str, str]) -> None:
    """A window's layers keep that many positions (and one that takes what is not kept); bf16 weights have no copy in
    fp32."""
    model = LanguageModel(sources["smollm3, windows"], precision="bf16")
    windows = [model.config.model.window(layer) for layer in range(3)]
    assert None in windows and 5 in windows
    per_slot = 2 * model.config.model.kv_heads * model.config.model.head_size * 2
    assert model.new_cache(4, 60).nbytes == 4 * per_slot * sum((window or 60) + 1 for window in windows)
    buckets = model._stage.gatherer.buckets
    assert {bucket.master.data_ptr() for bucket in buckets} == {bucket.weights.data_ptr() for bucket in buckets}
    (token,) = next(model.continuations([[1, 2, 3]], 1, Sampling(temperature=0.0)))
    assert 0 <= token < VOCAB


def test_training_options_do_not_matter() -> None:
    train = {"precision": "bf16", "recompute": "full", "fp8": "block", "indexer": "warmup"}
    config = for_inference(from_dict({"train": train, "parallel": {"tp": 4, "pp": 2, "dp": 2, "zero": 3}}), pp=3)
    got, parallel = config.train, config.parallel
    assert (got.precision, got.recompute, got.fp8, got.indexer) == ("fp32", "none", "none", "sparse")
    assert (parallel.tp, parallel.pp, parallel.zero) == (1, 3, 0)


def test_experts_are_split_over_tensor_parallel_ranks() -> None:
    """As far as both numbers have a common divisor."""
    config = from_dict({"model": {"num_experts": 6}, "parallel": {"ep": 3, "dp": 3}})
    assert [for_inference(config, tp=tp).parallel.ep for tp in (1, 2, 4, 5)] == [1, 2, 2, 1]


def test_texts_end_where_the_generation_settings_say(sources: dict[str, str], tmp_path: Path) -> None:
    source = open_source(sources["gpt2"])
    assert source.companions is not None
    assert end_tokens(source, ByteTokenizer()) == {256, 2}
    settings = source.companions / "generation_config.json"
    before = settings.read_text()
    settings.write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert end_tokens(source, ByteTokenizer()) == {256, 7, 9}
    settings.write_text("{}")
    assert end_tokens(source, ByteTokenizer()) == {256, 2}, "config.json's"
    settings.write_text(before)


# ---- draws


def expected_probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    """Plainly: the most likely tokens that top_k and then top_p leave, by their probability at the temperature."""
    weights = [math.exp(value / sampling.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])[: sampling.top_k or None]
    total, kept, covered = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if covered < sampling.top_p:
            kept.append(token)
        covered += weights[token] / total
    return [
        weights[token] / sum(weights[each] for each in kept) if token in kept else 0.0 for token in range(len(logits))
    ]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, 0), Sampling(0.5, 4), Sampling(2.0, 0, 0.7), Sampling(1.3, 6, 0.5), Sampling(1.0, 0, 1e-9)],
    ids=str,
)
def test_draws_have_the_probabilities_of_the_logits(sampling: Sampling) -> None:
    """Numbers that are spread evenly over [0, 1) give each token as often as it is likely."""
    logits = [0.3, -1.0, 2.0, 1.9, 0.0, -2.5, 1.1, 0.9]
    count = 4000
    drawn = draw(torch.tensor([logits]).expand(count, -1), sampling, [(i + 0.5) / count for i in range(count)]).tolist()
    for token, probability in enumerate(expected_probabilities(logits, sampling)):
        assert drawn.count(token) / count == pytest.approx(probability, abs=1 / count)


def test_a_draw_never_gives_what_has_no_probability() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0]] * 3)
    assert set(draw(logits, Sampling(1.0, 0), [0.0, 0.5, 1 - 2**-53]).tolist()) == {1, 3}
    assert draw(logits[:1], Sampling(1e-30, 0), [0.25]).tolist() in ([1], [3])


def test_a_draw_depends_on_seed_row_and_position_alone() -> None:
    keys = [(seed, row, position) for seed in range(4) for row in range(8) for position in range(50)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers) and numbers == [uniform(*key) for key in keys]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.03)


# ---- text


def pieces(reply: Reply, tokens: list[int]) -> list[str]:
    return [*(reply.push(token) for token in tokens), reply.finish()]


def test_characters_appear_when_they_are_whole() -> None:
    reply = Reply(ByteTokenizer(), [], ends={256})
    assert pieces(reply, list("é🎉x".encode())) == ["", "é", "", "", "", "🎉", "x", ""]
    assert reply.text == "é🎉x"


def test_what_is_no_character_is_not_held_for_ever() -> None:
    reply = Reply(ByteTokenizer(), [])
    shown = pieces(reply, [0x80] * 9)
    assert "".join(shown) == reply.text == "\ufffd" * 9
    assert shown[3] == "\ufffd" * 4, "a character has four bytes at most"
    cut = Reply(ByteTokenizer(), [])
    assert "".join(pieces(cut, list("aé".encode())[:-1])) == cut.text == "a\ufffd"


def test_a_stop_text_ends_it_wherever_tokens_are_cut() -> None:
    tokens = list(b"one\nQ: two\nQ. three")
    reply = Reply(ByteTokenizer(), [], stops=["\nQ.", "END"])
    shown = []
    for token in tokens:
        shown.append(reply.push(token))
        if reply.done:
            break
    assert reply.stopped and not reply.ended
    assert "".join(shown) == reply.text == "one\nQ: two"
    assert reply.tokens == list(b"one\nQ: two\nQ.")
    assert shown[3:6] == ["", "", "\nQ:"], "what may become a stop text is held back until it cannot"
    unfinished = Reply(ByteTokenizer(), [], stops=["END"])
    assert pieces(unfinished, list(b"the EN")) == ["t", "h", "e", " ", "", "", "EN"]


def test_an_end_token_is_no_text_and_releases_what_was_held() -> None:
    reply = Reply(ByteTokenizer(), list(b"before"), ends={256, 10}, stops=["END"])
    assert [reply.push(token) for token in [69, 78, 256]] == ["", "", "EN"]
    assert reply.ended and reply.tokens == [69, 78, 256] and reply.text == "EN"
