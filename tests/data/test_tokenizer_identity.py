"""A tokenizer's fingerprint is the same for every form of its files, and another where any id would be; other data is
refused by it."""

from __future__ import annotations

import inspect
import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import build
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.tokenizer.comparison import one_tokenizer
from megalite.data.tokenizer.identity import TokenizerIdentity, fingerprint, of_record, of_token_file, of_tokenizer
from megalite.data.tokenizer.tokenizers import load, train_sentencepiece

SOURCE = inspect.getsource(inspect)
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A byte-level BPE as tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([SOURCE], trainer)
    path = tmp_path_factory.mktemp("gpt2")
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A sentencepiece model with Llama's options."""
    import sentencepiece

    path = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    options = {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    with path.open("wb") as file:
        lines = iter(SOURCE.splitlines())
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=file, vocab_size=500, normalization_rule_name="identity", **options
        )
    return path


def rewritten(directory: Path, target: Path, change: Change) -> Path:
    shutil.copytree(directory, target)
    content = json.loads((target / "tokenizer.json").read_text())
    change(content)
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


def of(name: str | Path) -> str:
    return fingerprint(load(name))


def test_the_slow_and_the_fast_form_of_llamas_tokenizer_are_one(llama, tmp_path):
    """The sentencepiece model, what transformers makes of it, and that as a plain tokenizer.json with Llama's first
    rules."""
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "slow").mkdir()
    shutil.copy(llama, tmp_path / "slow" / "tokenizer.model")
    (tmp_path / "slow" / "tokenizer_config.json").write_text(json.dumps(settings))
    load(tmp_path / "slow")._tokenizer.save_pretrained(tmp_path / "fast")

    def as_first_published(content: dict[str, Any]) -> None:
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replaced],
        }
        content["pre_tokenizer"] = None

    first = rewritten(tmp_path / "fast", tmp_path / "first", as_first_published)
    (first / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert of(llama) == of(tmp_path / "slow") == of(tmp_path / "fast") == of(first)


def test_gpt2s_two_files_and_its_one_are_the_same(gpt2, tmp_path):
    model = json.loads((gpt2 / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|endoftext|>",
        "additional_special_tokens": ["<|end|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert of(tmp_path) == of(gpt2)


def older(content: dict[str, Any]) -> None:
    """As an older version of the tokenizers library writes it: merges in one string, no fields that are defaults, keys
    in another order."""
    model = content["model"]
    model["merges"] = [" ".join(merge) for merge in model["merges"]]
    model["vocab"] = dict(sorted(model["vocab"].items()))
    for name in (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
    ):
        model.pop(name, None)
    content |= {key: content.pop(key) for key in sorted(content, reverse=True)}


def test_files_of_another_version_of_the_library_are_the_same(gpt2, tmp_path):
    assert of(rewritten(gpt2, tmp_path / "old", older)) == of(gpt2)


def swap_pieces(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def swap_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def add_token(content: dict[str, Any], special: bool) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": 400, "content": "<|x|>", "special": special, **flags})


OTHERS: dict[str, Change] = {
    "two pieces exchanged": swap_pieces,
    "two merges exchanged": swap_merges,
    "one merge less": lambda c: c["model"]["merges"].pop(),
    "a space before the text": lambda c: c["pre_tokenizer"].update(add_prefix_space=True),
    "no words": lambda c: c["pre_tokenizer"].update(use_regex=False),
    "normalized": lambda c: c.update(normalizer={"type": "NFKC"}),
    "without case": lambda c: c.update(normalizer={"type": "Lowercase"}),
    "words that are pieces": lambda c: c["model"].update(ignore_merges=True, merges=c["model"]["merges"][:20]),
    "a control token more": lambda c: add_token(c, special=True),
    "a token more": lambda c: add_token(c, special=False),
    "a control token that is text": lambda c: c["added_tokens"][1].update(special=False),
}


def test_whatever_changes_ids_changes_the_fingerprint(gpt2, tmp_path):
    results = {
        name: of(rewritten(gpt2, tmp_path / str(number), change))
        for number, (name, change) in enumerate(OTHERS.items())
    }
    assert len({of(gpt2), *results.values()}) == len(OTHERS) + 1, results


def test_template_and_eos_are_not_part_of_it(gpt2, tmp_path):
    other = rewritten(gpt2, tmp_path / "other", lambda c: None)
    settings = json.loads((gpt2 / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": "{{ messages }}", "eos_token": "<|end|>"})
    )
    assert load(other).eos != load(gpt2).eos and of(other) == of(gpt2)


def test_a_record_says_as_much_as_the_tokenizer(gpt2, tmp_path):
    """Its files may be gone; without a record nothing is known."""
    moved = rewritten(gpt2, tmp_path / "moved", lambda c: None)
    recorded = of_token_file(text(tmp_path, "x", moved))
    assert of_record(json.loads(json.dumps(recorded.record()))) == recorded
    shutil.rmtree(moved)
    assert recorded.is_same(of_tokenizer(gpt2)) is True and recorded.is_same(of_tokenizer("byte")) is False
    assert of_record(None).is_same(recorded) is None
    assert of_tokenizer(tmp_path) == TokenizerIdentity(), "a directory without a tokenizer"
    other_definition = of_record({"name": "x", "fingerprint": "0-abc"})
    assert other_definition.is_same(recorded) is None


def text(tmp_path: Path, name: str, tokenizer: str | Path) -> str:
    (tmp_path / "text.txt").write_text(textwrap.dedent(SOURCE[:3000]))
    sources = open_inputs([str(tmp_path / "text.txt")], exclude=[], file_format="auto", text_key="text", split="train")
    prepare(sources, tmp_path / name, str(tokenizer))
    return str(tmp_path / name)


def test_prepared_data_names_its_tokenizer(gpt2, tmp_path):
    facts = of_token_file(text(tmp_path, "x", gpt2))
    assert (facts.fingerprint, facts.name) == (of(gpt2), str(gpt2)) and facts.is_same(of_tokenizer(gpt2))


def data(train: Any, validation: Any = None, **options: Any) -> DataConfig:
    return DataConfig(train=train, validation=validation, sequence_length=8, **options)


def test_data_of_two_tokenizers_of_one_size_do_not_meet(tmp_path):
    for number in (0, 1):
        train_sentencepiece([SOURCE[number * 8000 :][:8000]], 400, tmp_path / f"{number}.model")
    one, other = (text(tmp_path, f"x{number}", tmp_path / f"{number}.model") for number in (0, 1))
    build(data([one], one), 0)
    pieces = [load(tmp_path / f"{number}.model").structure().pieces for number in (0, 1)]
    first = next(i for i in range(400) if pieces[0][i] != pieces[1][i])
    for config in (data([one, other]), data({one: 1.0, other: 2.0}), data(one, other)):
        with pytest.raises(ConfigError) as caught:
            build(config, 0)
        said = str(caught.value)
        assert (
            f"= {other} was made with another tokenizer than data.train = {one} ({tmp_path}/0.model and "
            f"{tmp_path}/1.model)" in said
        )
        before, now = (json.dumps(each[first], ensure_ascii=False) for each in pieces)
        assert f"id {first} is {before} there and {now} here" in said and said.count("there and") == 5
        assert "Prepare both with one tokenizer" in said and said.endswith(
            "accept the change with data.allow_tokenizer_change = true."
        )
        config.allow_tokenizer_change = True
        build(config, 0)
        assert "which data.allow_tokenizer_change = true accepts" in one_tokenizer(config)[0]
    (tmp_path / "1.model").unlink()
    with pytest.raises(ConfigError, match=r"Which ids differ cannot be shown: .*1\.model does not exist"):
        build(data([one, other]), 0)


def test_data_from_before_is_accepted_with_a_note(tmp_path):
    one, other = text(tmp_path, "one", "byte"), text(tmp_path, "other", "byte")
    facts = json.loads(Path(f"{other}.json").read_text())
    Path(f"{other}.json").write_text(json.dumps({key: facts[key] for key in ("vocab_size", "eos")}))
    build(data([one, other]), 0)
    assert one_tokenizer(data([one, other])) == [
        f"the tokenizer of data.train = {other} is not known, so whether it is that of data.train = {one} is not "
        "checked"
    ]
    assert one_tokenizer(data([other])) == []


def test_several_chat_templates_are_noted(tmp_path):
    one, other = text(tmp_path, "one", "byte"), text(tmp_path, "other", "byte")
    for number, prefix in enumerate((one, other)):
        facts = json.loads(Path(f"{prefix}.json").read_text())
        Path(f"{prefix}.json").write_text(json.dumps(facts | {"chat": {"template_hash": f"hash{number}"}}))
    (note,) = one_tokenizer(data([one, other]))
    assert (
        note.startswith("the conversations were rendered with several chat templates: ")
        and "hash0" in note
        and "hash1" in note
    )
    assert one_tokenizer(data([one, one])) == []
