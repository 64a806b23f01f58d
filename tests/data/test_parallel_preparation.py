"""Work that workers do: ranges of files, long texts in pieces, tokenizers that are sent. Nothing of it shows in the
result."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.indexed import IndexedTokens
from megalite.data.preparation import pool
from megalite.data.preparation.encoded import Encoded
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.preparation.tasks import Task
from megalite.data.preparation.texts import Texts
from megalite.data.tokenizer import tokenizers as tokenizing
from tests.structure.sources import ROOT

SOURCES = "".join(inspect.getsource(module) for module in (inspect, textwrap, json))
ODD = "grüße 日本語 🎉 <|endoftext|> </s>\r\n\r\n  \n\t\n" + "no line end in " * 300 + "\n"
TEXT = SOURCES[:30_000] + ODD + SOURCES[30_000:60_000] + ODD * 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A byte-level BPE whose tokenizer.json also says that texts are truncated and padded, as sentence encoders' do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [SOURCES],
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    raw.add_tokens([AddedToken("<think>", special=False)])
    raw.enable_truncation(8)
    raw.enable_padding(length=16)
    path = tmp_path_factory.mktemp("hf")
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>").save_pretrained(path)
    assert json.loads((path / "tokenizer.json").read_text())["truncation"]
    return path


def metaspace(path: Path) -> Path:
    """A BPE that writes a space before every text, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()
    raw.train_from_iterator(
        [SOURCES], trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>").save_pretrained(path)
    return path


def sentencepiece(path: Path) -> Path:
    tokenizing.train_sentencepiece([SOURCES], 600, path)
    return path


def sources(*names: Path) -> list[Any]:
    return open_inputs([str(name) for name in names], exclude=[], file_format="auto", text_key="text", split="train")


@pytest.mark.parametrize("name", ["byte", "sentencepiece", "hugging face", "space before every text"])
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(name, tmp_path, monkeypatch, directory):
    tokenizers_by_name = {
        "sentencepiece": lambda: sentencepiece(tmp_path / "m.model"),
        "hugging face": lambda: directory,
    }
    tokenizers_by_name["space before every text"] = lambda: metaspace(tmp_path / "hf")
    tokenizer = str(tokenizers_by_name[name]() if name in tokenizers_by_name else name)
    monkeypatch.setattr("megalite.data.preparation.sources.PIECE_BYTES", 4_000)
    monkeypatch.setattr("megalite.data.preparation.sources.LONG_TEXT", 10_000)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "long.txt").write_bytes(TEXT.encode() + b"\xff\n" + TEXT.encode())
    encoder, loaded = Texts(), tokenizing.load(tokenizer)
    parts = [encoder.encode(task, loaded) for task in sources(tmp_path / "short.txt", tmp_path / "long.txt")[0].tasks()]
    assert sum(part.continues for part in parts) > 10, "it was cut"
    summary = prepare(
        sources(tmp_path / "short.txt", tmp_path / "long.txt", tmp_path / "short.txt"), tmp_path / "x", tokenizer
    )
    prepared = IndexedTokens(tmp_path / "x")
    whole = loaded.encode(TEXT + "\ufffd\n" + TEXT)
    short = [*loaded.encode("short"), loaded.eos]
    assert prepared.tokens.tolist() == [*short, *whole, loaded.eos] and prepared.sizes.tolist() == [
        len(short),
        len(whole) + 1,
    ]
    assert (summary.documents, summary.replaced_documents, summary.longest) == (2, 1, len(whole) + 1)


def test_a_text_without_line_ends_is_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("megalite.data.preparation.sources.PIECE_BYTES", 100)
    monkeypatch.setattr("megalite.data.preparation.sources.LONG_TEXT", 300)
    (tmp_path / "a.txt").write_text("word " * 200)
    prepare(sources(tmp_path / "a.txt"), tmp_path / "x", "byte")
    assert IndexedTokens(tmp_path / "x").tokens.tolist() == [*b"word " * 200, 256]


def test_tokens_are_those_of_transformers(directory):
    """Also where tokenizer.json truncates and pads, and texts are spelled like special tokens."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(directory), tokenizing.load(directory)
    texts = [TEXT, "", "<think>a</think><|endoftext|>", " ", "\n"]
    expected = [theirs.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts]
    assert len(expected[0]) > 10_000 and ours.eos not in expected[2]
    assert [ours.encode(text) for text in texts] == list(map(list, ours.encode_batch(texts))) == expected
    with_special = theirs(texts[2], add_special_tokens=False, return_offsets_mapping=True)
    rendered = [
        (token, *where) for token, where in zip(with_special["input_ids"], with_special["offset_mapping"], strict=True)
    ]
    assert ours.encode_rendered(texts[2]) == rendered and ours.eos in with_special["input_ids"]


def test_a_worker_encodes_without_importing_transformers(directory, tmp_path):
    tokenizer = tokenizing.load(directory)
    (tmp_path / "tokenizer").write_bytes(pickle.dumps(tokenizer))
    code = f"import pickle, sys\ntokenizer = pickle.load(open({str(tmp_path / 'tokenizer')!r}, 'rb'))\n"
    code += "print(tokenizer.encode('def f(x):'), {'transformers', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"{tokenizer.encode('def f(x):')} set()\n"


def test_two_workers_write_what_one_writes(tmp_path, monkeypatch):
    """A long text in pieces, and ranges of one file of lines of which some are bad and some are longer than a range."""
    for name, size in (("TASK_BYTES", 2_000), ("PIECE_BYTES", 4_000), ("LONG_TEXT", 10_000)):
        monkeypatch.setattr(f"megalite.data.preparation.sources.{name}", size)
    model = sentencepiece(tmp_path / "m.model")
    (tmp_path / "long.txt").write_text(TEXT)
    lines = [json.dumps({"text": TEXT[i : i + i % 3000]}) for i in range(0, 50_000, 777)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:30], "bad", *lines[30:]]))
    results = []
    for workers in (1, 2):
        prefix = tmp_path / str(workers) / "x"
        summary = prepare(
            sources(tmp_path / "long.txt", tmp_path / "a.jsonl"), prefix, str(model), Texts(skip_bad=1), workers=workers
        )
        assert summary.skipped_first == [
            f"{tmp_path}/a.jsonl line 31 is not valid JSON (Expecting value: line 1 column 1 (char 0))."
        ]
        results.append({end: Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx", "json")})
    assert results[0] == results[1]


def test_tasks_name_what_workers_read(tmp_path):
    """What is sent does not grow with the input."""
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": "a" * 1000}) + "\n") * 2000)
    (tmp_path / "a.txt").write_text("a line\n" * 700_000)
    for name in ("a.jsonl", "a.txt"):
        tasks = [task for source in sources(tmp_path / name) for task in source.tasks()]
        assert len(tasks) >= 5 and sum(task.size for task in tasks) == (tmp_path / name).stat().st_size
        assert max(len(pickle.dumps(task)) for task in tasks) < 1000


def test_by_default_every_usable_core_works(monkeypatch):
    monkeypatch.setattr(pool, "usable_cores", lambda: 6)
    assert [pool.default_workers(size) for size in (0, 5 << 20, 9 << 20, 1 << 30)] == [1, 1, 2, 6]


class Unusual:
    """An encoder that does what the first text of a task says, in a worker."""

    def encode(self, task: Task, tokenizer: tokenizing.Tokenizer) -> Encoded:
        what = task.texts[0]
        if what == "fail":
            raise ValueError("it broke")
        if what == "be killed":
            Connection._send = self._half  # type: ignore[attr-defined]
        if what.startswith("be slow"):
            time.sleep(0.1)
            return Encoded(task.size, np.zeros(len(what), np.uint16))
        masked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return Encoded(task.size, forms={"SIGINT is blocked"} if masked else set())

    @staticmethod
    def _half(connection: Connection, message: bytes) -> None:
        os.write(connection.fileno(), message[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


def answers(encoder: pool.Encoder, *texts: str) -> Iterator[Any]:
    """What two workers answer, up to the first error."""
    tasks = (Task(number, texts=(text,)) for number, text in enumerate(texts))
    try:
        for result in pool.encoded(tasks, tokenizing.load("byte"), encoder, 2):
            yield result.input_bytes, len(result.tokens), sorted(result.forms)
    except Exception as error:
        yield type(error).__name__, str(error), *(line.strip() for line in getattr(error, "__notes__", ()))


def answered(encoder: str, texts: str) -> list[Any]:
    """`answers` of a process that may hang."""
    code = "import json; from tests.data.test_parallel_preparation import *; "
    code += f"print(json.dumps(list(answers({encoder}(), *{texts}))))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_worker_that_is_killed_while_it_sends_a_result_is_noticed():
    """Also where the other one lives. Without a pipe of its own the rest of the result would be awaited for ever."""
    assert [answer[0] for answer in answered("Unusual", "['be killed', 'work']")] == ["WorkerLost"]


def test_workers_leave_ctrl_c_to_the_command_and_tell_where_they_failed():
    *results, error = answered("Unusual", "['work'] * 3 + ['fail'] + ['work'] * 20")
    assert results == [[number, 0, ["SIGINT is blocked"]] for number in range(3)]
    assert error[:2] == ["ValueError", "it broke"] and 'raise ValueError("it broke")' in error[2]


def test_tasks_and_results_that_no_pipe_holds_pass_each_other():
    """A worker sends a result while it is sent a task."""
    results = answered("Unusual", "['be slow' + 'a' * 999_993] * 12")
    assert results == [[number, 1_000_000, []] for number in range(12)]
