"""Tokenizers give text back, end documents in EOS, and refuse what they cannot read."""

import inspect
import json
import shutil
import textwrap
from pathlib import Path

import pytest

from megalite.data.indexed import DataError
from megalite.data.tokenizer import tokenizers as tokenizing
from megalite.data.tokenizer.identity import of_tokenizer
from megalite.data.tokenizer.tokenizers import load
from megalite.huggingface.companions import check_vocabulary
from megalite.huggingface.files import ConversionError

SOURCES = [inspect.getsource(module) for module in (inspect, json, textwrap)]
HARD = [
    "",
    "\n",
    "  two leading spaces, two trailing  ",
    "\tindent\n\t\ttwice\r\n\r\n\n\n",
    "a\x00b\x7f\x1b[0m",
    "grüße 日本語 🎉 e\u0301 \ufeff\u2028\xa0",
    "</s> <unk> <0x0A> <|endoftext|>",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "code.model"
    tokenizing.train_sentencepiece(SOURCES[:1], 600, path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A byte-level BPE in a Hugging Face directory, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(SOURCES[:1], trainer)
    path = tmp_path_factory.mktemp("hf")
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>").save_pretrained(path)
    return path


@pytest.fixture(params=["byte", "sentencepiece", "huggingface"])
def tokenizer(request) -> tokenizing.Tokenizer:
    fixture = {"sentencepiece": "model", "huggingface": "directory"}.get(request.param)
    return tokenizing.load(request.getfixturevalue(fixture) if fixture else "byte")


def test_text_comes_back(tokenizer):
    """Newlines and indentation of source code that the tokenizer was not trained on, and every odd character."""
    for text in SOURCES + HARD:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eos not in ids, "no text ends a document"


def test_encodings_join(tokenizer):
    """No space appears where one encoded text follows another, as a continuation follows its prompt."""
    assert tokenizer.decode(tokenizer.encode("return\n") + tokenizer.encode("self.x")) == "return\nself.x"


def test_eos_is_an_id_that_decodes_to_nothing(tokenizer):
    assert 0 <= tokenizer.eos < tokenizer.vocab_size
    assert tokenizer.decode([*tokenizer.encode("a b"), tokenizer.eos]) == "a b"


def test_bytes():
    tokenizer = tokenizing.load("byte")
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.files) == (257, 256, [])
    assert tokenizer.encode("Aé\n") == [65, 0xC3, 0xA9, 10]
    assert tokenizer.decode([65, 0xC3]) == "A\ufffd"


def test_trained_pieces_compress_code(model):
    tokenizer = tokenizing.load(model)
    assert (tokenizer.vocab_size, tokenizer.files) == (600, [model])
    assert len(tokenizer.encode(SOURCES[1])) < 0.6 * len(SOURCES[1])
    assert len(tokenizer.encode(" " * 8)) <= 2, "indentation is pieces, not bytes"


def test_training_depends_on_the_texts_alone(model, tmp_path):
    tokenizing.train_sentencepiece(iter(SOURCES[:1]), 600, tmp_path / "again.model")
    tokenizing.train_sentencepiece(SOURCES[1:2], 600, tmp_path / "other.model")
    assert (tmp_path / "again.model").read_bytes() == model.read_bytes() != (tmp_path / "other.model").read_bytes()


def test_one_long_line_is_learned_from(tmp_path):
    """sentencepiece would skip a sentence above its limit without a word."""
    tokenizing.train_sentencepiece(["abcabcabd" * 5000], 270, tmp_path / "x.model")
    assert len(tokenizing.load(tmp_path / "x.model").encode("abcabcabd")) < 5


@pytest.mark.parametrize(("texts", "vocab"), [([], 600), ([""], 600), (["hello world"] * 5, 4096), (SOURCES[:1], 100)])
def test_untrainable(tmp_path, texts, vocab):
    with pytest.raises(DataError, match=f"--train_tokenizer {vocab}") as caught:
        tokenizing.train_sentencepiece(texts, vocab, tmp_path / "x.model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_sentencepiece_without_eos_is_refused(tmp_path):
    import sentencepiece

    with (tmp_path / "x.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SOURCES),
            model_writer=file,
            vocab_size=400,
            model_type="bpe",
            eos_id=-1,
            minloglevel=2,
            max_sentence_length=10**6,
        )
    with pytest.raises(DataError, match="has no end-of-sentence piece"):
        tokenizing.load(tmp_path / "x.model")


def test_directory_without_eos_is_refused(directory, tmp_path):
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="has no eos_token"):
        tokenizing.load(tmp_path)


def test_unreadable(tmp_path):
    (tmp_path / "x.model").write_bytes(b"not a model")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("x.model", "is not a sentencepiece model"),
        ("empty", "as a tokenizer directory"),
        ("none", "does not exist"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            tokenizing.load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_json_alone_is_a_tokenizer(directory, tmp_path):
    """As a file, and in a directory without settings: EOS is the token with a usual name. Beside its settings it is the
    directory."""
    whole, text = load(directory), "def f(x):\n    return x  # ½ 🎉"
    (tmp_path / "alone").mkdir()
    for place in (tmp_path / "alone" / "tokenizer.json", tmp_path / "mine.json"):
        shutil.copy(directory / "tokenizer.json", place)
    for name in (
        tmp_path / "alone" / "tokenizer.json",
        tmp_path / "alone",
        tmp_path / "mine.json",
        directory / "tokenizer.json",
    ):
        loaded = load(name)
        assert (loaded.vocab_size, loaded.eos, loaded.encode(text)) == (whole.vocab_size, whole.eos, whole.encode(text))
        assert of_tokenizer(name).known() == of_tokenizer(directory).known()
    assert load(directory / "tokenizer.json").name == str(directory)
    content = json.loads((tmp_path / "mine.json").read_text())
    for token in content["added_tokens"]:
        token["content"] = token["content"].replace("<|endoftext|>", "<the end>")
    (tmp_path / "mine.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="has no eos_token.*Set it in tokenizer_config.json"):
        load(tmp_path / "mine.json")


def test_ids_may_leave_a_gap(directory, tmp_path):
    """The number of rows that the model needs follows from the largest id, which is what the library gives, not from
    the count."""
    from transformers import AutoTokenizer

    shutil.copytree(directory, tmp_path / "gap")
    path = tmp_path / "gap" / "tokenizer.json"
    content = json.loads(path.read_text())
    before = load(directory).vocab_size
    content["added_tokens"].append({**content["added_tokens"][-1], "id": before + 9, "content": "<late>"})
    path.write_text(json.dumps(content))  # the library numbers it without the gap
    assert load(path.parent).vocab_size == before + 1 and load(path.parent).unused_ids == 0
    check_vocabulary(path.parent, before + 1)
    content["model"]["vocab"]["zz"] = before + 20
    path.write_text(json.dumps(content))
    loaded = load(path.parent)
    assert loaded.vocab_size == max(AutoTokenizer.from_pretrained(path.parent).get_vocab().values()) + 1 == before + 21
    assert loaded.unused_ids > 0
    check_vocabulary(path.parent, before + 21)
    with pytest.raises(ConversionError, match=f"has token id {before + 20}"):
        check_vocabulary(path.parent, before + 20)
