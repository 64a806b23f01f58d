"""Documents that are rewritten for fill-in-the-middle, taken apart again."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.config.samples import held_out_start
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import build
from megalite.data.fill_in_the_middle import FAMILIES, FillInTheMiddle
from megalite.data.indexed import IndexedTokens
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.streams.stream import Streamed
from megalite.data.tokenizer.tokenizers import Tokenizer, load
from tests.data.streams import TEXTS, shares, write_jsonl

S = 24


def write_tokenizer(directory: Path, special: tuple[str, ...], space: bool = False) -> str:
    """A tokenizer of bytes, or with `space` of characters, which adds a space before each text."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if space:
        letters = sorted({*"".join(TEXTS), "▁"})
        raw = Raw(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        raw.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        raw = Raw(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load(write_tokenizer(tmp_path_factory.mktemp("starcoder"), FAMILIES["StarCoder"]))


def parts(ids: list[int], fim: FillInTheMiddle) -> tuple[str, list[int], list[int], list[int]]:
    """The form, prefix, suffix and middle of a document. The last two are joined in SPM."""
    assert ids[0] == fim.prefix and [ids.count(each) for each in (fim.prefix, fim.suffix, fim.middle)] == [1, 1, 1]
    suffix, middle = ids.index(fim.suffix), ids.index(fim.middle)
    assert suffix < middle
    return "SPM" if suffix == 1 else "PSM", ids[1:suffix], ids[suffix + 1 : middle], ids[middle + 1 :]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_a_family(family, tmp_path):
    names = FAMILIES[family]
    tokenizer = load(write_tokenizer(tmp_path, (*names[::-1], "<other>")))
    fim = FillInTheMiddle.of(tokenizer, 1.0, 0.0, None)
    assert tokenizer.spell([fim.prefix, fim.suffix, fim.middle]).split(">")[:3] == "".join(names).split(">")[:3]
    assert FillInTheMiddle.of(tokenizer, 1.0, 0.0, ["<other>", names[1], names[0]]).middle == fim.prefix
    with pytest.raises(ConfigError, match="has no token <none>"):
        FillInTheMiddle.of(tokenizer, 1.0, 0.0, ["<none>", names[1], names[0]])
    with pytest.raises(ConfigError, match="data.fim_rate = 1 needs .* byte has none of StarCoder"):
        FillInTheMiddle.of(load("byte"), 1.0, 0.0, None)


@pytest.mark.parametrize("spm_rate", [0.0, 0.3, 1.0])
def test_the_parts_are_the_document(spm_rate, tokenizer):
    """Cut at two places of all its characters, anywhere, in the two forms at their rate."""
    fim = FillInTheMiddle.of(tokenizer, 0.6, spm_rate, None)
    text = "grüße x=1\n  日本"
    assert sum(map(fim.chosen, range(2000))) == pytest.approx(1200, abs=100)
    forms, cuts = [], []
    for key in range(2000):
        ids = fim.rewritten(text, key)
        assert ids == fim.rewritten(text, key)
        form, before, after, middle = parts(ids, fim)
        before, after, middle = (tokenizer.decode(each) for each in (before, after, middle))
        assert before + middle + after == text
        forms.append(form)
        cuts += [len(before), len(text) - len(after)]
    empty = 1 - (len(text) / (len(text) + 1)) ** 2  # a prefix without characters makes PSM look like SPM
    expected = 2000 * (spm_rate + (1 - spm_rate) * empty)
    assert forms.count("SPM") == pytest.approx(expected, abs=0 if spm_rate == 1 else 100)
    assert {*cuts} == {*range(len(text) + 1)}
    if spm_rate == 0:  # two uniform draws
        assert np.bincount(cuts) == pytest.approx(4000 / (len(text) + 1), rel=0.25)


def test_a_tokenizer_that_adds_a_space_does_so_once(tmp_path):
    tokenizer = load(write_tokenizer(tmp_path, FAMILIES["CodeLlama"], space=True))
    fim = FillInTheMiddle.of(tokenizer, 1.0, 0.0, None)
    (space,) = tokenizer.encode("")[:1] or tokenizer.encode(" ")[:1]
    for key in range(50):
        _, before, after, middle = parts(fim.rewritten("=1x", key), fim)
        assert [before, middle, after].count([]) + (before + middle + after).count(space) <= 3
        assert space not in middle + after
        assert tokenizer.decode(before) + "".join(tokenizer.decode(each) for each in (middle, after)) == "=1x"


def documents(data: Any, samples: int, eos: int) -> list[list[int]]:
    rows = [data[i] for i in range(samples)]
    tokens = [int(rows[0].tokens[0]), *(int(token) for row in rows for token in row.targets)]
    ends = [-1, *(i for i, token in enumerate(tokens) if token == eos)]
    return [tokens[start + 1 : end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("source", ["token file", "stream"])
def test_documents_are_rewritten_before_they_are_packed(source, tokenizer, tmp_path):
    name = write_jsonl(tmp_path, shares())
    options: dict[str, Any] = {"sequence_length": S, "lanes": 1, "fim_rate": 0.5, "shuffle": False}
    if source == "token file":
        sources = open_inputs([name[6:]], exclude=[], file_format="auto", text_key="text", split="train")
        prepare(sources, tmp_path / "tokens", tokenizer.name)
        name, held_out = str(tmp_path / "tokens"), 0.2
        config = DataConfig(name, held_out, **options)
    else:
        config = DataConfig(name, None, tokenizer=tokenizer.name, **options)
    data, validation = build(config, 3)
    again, _ = build(config, 3)
    other, _ = build(config, 4)
    assert isinstance(data, Streamed) and isinstance(again, Streamed)
    texts = [text for text in TEXTS if text]
    if source == "token file":
        assert validation is not None
        file = IndexedTokens(name)
        texts = texts[: int(np.searchsorted(np.cumsum(file.sizes), held_out_start(file, held_out), side="right"))]
        assert 30 < len(texts) < 59 and not isinstance(validation, Streamed)
        held = documents(validation, validation.samples_per_epoch, tokenizer.eos)
        assert held[0] == tokenizer.encode([text for text in TEXTS if text][len(texts)])
    fim = FillInTheMiddle.of(tokenizer, 0.5, 0.5, None)
    read = documents(data, 700, tokenizer.eos)
    assert len(read) > 2 * len(texts)
    rewritten = []
    for number, ids in enumerate(read):
        text = texts[number % len(texts)]
        if fim.prefix in ids:
            form, before, after, middle = parts(ids, fim)
            assert "".join(map(tokenizer.decode, (before, middle, after))) == text
            rewritten.append((number // len(texts), number % len(texts), form, len(after)))
        else:
            assert tokenizer.decode(ids) == text
    assert 0.35 < len(rewritten) / len(read) < 0.65 and {form for *_, form, _ in rewritten} == {"PSM", "SPM"}
    first, second = ([each[1:] for each in rewritten if each[0] == epoch] for epoch in (0, 1))
    assert first != second, "other cuts in each epoch"
    assert data.fingerprint == again.fingerprint != other.fingerprint
    again.restore(0, data.positions([0], 333)[0].tolist())
    assert [again[i].tokens.tolist() for i in range(333, 360)] == [data[i].tokens.tolist() for i in range(333, 360)]


def test_a_sample_does_not_depend_on_lanes_or_order(tokenizer, tmp_path):
    """A document has the same cut in every lane and order."""
    name = write_jsonl(tmp_path, shares())
    seen = []
    for options in ({"lanes": 1, "shuffle": False}, {"lanes": 2}, {"lanes": 6, "shuffle_buffer": 3}):
        config = DataConfig(name, None, sequence_length=S, tokenizer=tokenizer.name, fim_rate=0.7, **options)
        data, _ = build(config, 3)
        count = 340 // options["lanes"]
        lanes = [
            documents([data[row * options["lanes"] + lane] for row in range(count)], count, tokenizer.eos)
            for lane in range(options["lanes"])
        ]
        seen.append({json.dumps(ids) for lane in lanes for ids in lane})
    assert len(seen[0] & seen[1] & seen[2]) > 40
