"""`megalite data inspect`: counts by hand, duplicates, lengths, and documents with what counts, on a terminal and
elsewhere."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.commands.data import main
from megalite.data.chat.preference_records import PreferenceReader
from megalite.data.inspection import histogram
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.preferences import PreferenceEncoder
from megalite.data.preparation.prepare import Encoder, prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.preparation.texts import Texts
from megalite.data.preparation.writer import IndexedWriter
from tests.data.chats import CHATML, SHORT, write_lines, write_tokenizer

TEXTS = ["one", "two 🎉", "one", "a longer text [bold]than[/bold] the others", "one"]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Texts, of which one is there three times."""
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    return prepared(tmp_path, "a.jsonl", Texts())


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    turns = [*SHORT, {"role": "user", "content": "More."}, {"role": "assistant", "content": "No.", "weight": 0}]
    write_lines(tmp_path / "c.jsonl", [{"messages": turns}, {"prompt": "Say ", "completion": "x"}])
    return prepared(tmp_path, "c.jsonl", Chats())


def prepared(folder: Path, name: str, encoder: Encoder, tokenizer: str = "byte") -> Path:
    text_key = "text" if isinstance(encoder, Texts) else None
    prepare(
        open_inputs([str(folder / name)], exclude=[], file_format="auto", text_key=text_key, split="train"),
        folder / "x",
        tokenizer,
        encoder,
    )
    return folder / "x"


def content_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_counts_are_those_of_the_documents(prefix, capsys):
    content = content_of(capsys, prefix)
    sizes = [len(text.encode()) + 1 for text in TEXTS]
    assert (content["documents"], content["tokens"], content["bytes"], content["kind"]) == (
        5,
        sum(sizes),
        2 * sum(sizes),
        "text",
    )
    assert (content["duplicates"], content["duplicate_share"], content["without_eos"]) == (2, 0.4, 0)
    assert (content["vocab_size"], content["eos"], content["largest_id"], content["tokenizer"]) == (
        257,
        256,
        256,
        "byte",
    )
    assert (
        content["lengths"]["min"] == 4
        and content["lengths"]["max"] == max(sizes)
        and content["lengths"]["mean"] == sum(sizes) / 5
    )
    assert [(each["from"], each["documents"], each["tokens"]) for each in content["histogram"]] == [
        (4, 3, 12),
        (8, 1, 9),
        (16, 0, 0),
        (32, 1, 43),
    ]
    assert [sample["document"] for sample in content["longest"]] == [3, 1, 0, 2, 4]


def test_what_counts_is_marked(chats, capsys):
    content = content_of(capsys, chats, "--document", "0", "--document", "1")
    parts = [[(part["text"], part["counts"]) for part in sample["parts"]] for sample in content["samples"]]
    assert parts[0][:2] == [("<|user|>\nAdd\n\n1+1\n<|assistant|>\n", False), ("It is 2.<EOS>", True)]
    assert "No." in parts[0][2][0] and len(parts[0]) == 3 and parts[1] == [("Say ", False), ("x<EOS>", True)]
    assert (content["kind"], content["loss_tokens"], content["without_loss"]) == ("chat", 9 + 2, 0)
    assert content["forms"] == ["messages", "prompt-completion"]
    assert main(["inspect", str(chats)]) == 0
    out = capsys.readouterr().out
    assert "⟦It is 2.<EOS>⟧" in out and "Say ⟦x<EOS>⟧" in out and "\x1b" not in out
    assert "conversations (messages, prompt-completion): 11 tokens in the loss" in out


def test_weights_and_preferences_are_shown(tmp_path, capsys):
    heavy = [SHORT[0], {**SHORT[1], "weight": -0.5}]
    write_lines(tmp_path / "c.jsonl", [{"messages": heavy}, {"messages": SHORT}])
    prefix = prepared(tmp_path, "c.jsonl", Chats())
    assert main(["inspect", str(prefix)]) == 0
    out = capsys.readouterr().out
    assert "⟦It is 2.<EOS>⟧×-0.5" in out and "⟦It is 2.<EOS>⟧\n" in out and "weights of tokens: from -0.5 to 1" in out
    content = content_of(capsys, prefix)
    assert (content["loss_tokens"], content["weights"]) == (2 * 9, [-0.5, 1.0])

    pairs = [{"prompt": "q" * 300, "chosen": "yes", "rejected": "n" * n} for n in (1, 2, 3)]
    write_lines(tmp_path / "p.jsonl", pairs)
    (tmp_path / "x.idx").unlink()
    prefix = prepared(tmp_path, "p.jsonl", PreferenceEncoder())
    assert main(["inspect", str(prefix), "--document", "3", "--length", "4"]) == 0
    out = capsys.readouterr().out
    assert "pair 1, documents 2 and 3: 304 and 303 tokens, 4 and 3 in the completions\nqqqq\n" in out
    assert "chosen: ⟦yes<EOS>⟧\nrejected: ⟦nn<EOS>⟧\n" in out and "preferences (pairs): 3 chosen, 3 rejected" in out
    content = content_of(capsys, prefix, "--samples", "2")
    assert [(each["document"], each["chosen"]) for each in content["samples"]] == [
        (0, True),
        (1, False),
        (4, True),
        (5, False),
    ]
    assert (content["kind"], content["chosen"], content["rejected"], content["loss_tokens"]) == ("pairs", 3, 3, 21)
    (tmp_path / "x.idx").unlink()
    prefix = prepared(tmp_path, "p.jsonl", PreferenceEncoder(reader=PreferenceReader(kind="labelled")))
    assert main(["inspect", str(prefix), "--document", "1", "--length", "4"]) == 0
    out = capsys.readouterr().out
    assert "document 1: 302 tokens, 2 in the bad completion, showing 6 of them\nqqqq⟦n<EOS>⟧" in out
    assert "3 good, 3 bad" in out


def test_on_a_terminal_what_counts_is_green(chats, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["inspect", str(chats)]) == 0
    out = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32mIt is 2.<EOS>\x1b[0m" in out and "⟦" not in out


def test_text_is_printed_as_it_is(prefix, capsys):
    assert main(["inspect", str(prefix), "--samples", "5", "--length", "11"]) == 0
    out = capsys.readouterr().out
    assert "two 🎉<EOS>" in out and "document 3: 43 tokens, showing the first 11\na longer te\n" in out
    assert "        3          43 tokens  a longer text [bold]than[/b" in out
    assert "2 documents repeat an earlier one (40.0%)" in out and "⟦" not in out
    bars = [line.count("█") for line in out.splitlines() if " of the tokens" in line]
    assert bars == [40, 14, 0, 14]


def test_control_tokens_are_spelled(tmp_path, capsys):
    write_lines(tmp_path / "c.jsonl", [{"messages": SHORT}])
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML)
    prefix = prepared(tmp_path, "c.jsonl", Chats(), str(tokenizer))
    (sample,) = content_of(capsys, prefix)["samples"]
    assert [part["text"] for part in sample["parts"]] == [
        "<|im_start|>user\nAdd\n\n1+1<|im_end|>\n<|im_start|>assistant\n",
        "It is 2.<|im_end|>",
        "\n",
    ]


def test_files_of_other_tools_are_shown_as_numbers(tmp_path, capsys):
    """Megatron-LM's files have no PREFIX.json, and several sequences may be one document."""
    with IndexedWriter(tmp_path / "x", 70_000) as writer:
        writer.add(np.array([5, 6, 69_999, 5, 6]), [3, 2])
        writer.finish({})
    (tmp_path / "x.json").unlink()
    content = content_of(capsys, tmp_path / "x")
    assert (
        content["samples"][0]["parts"] == [{"text": "5 6 69999", "counts": True, "weight": 1.0}]
        and "does not specify a tokenizer" in content["tokenizer_problem"]
    )
    assert content["vocab_size"] is None and content["without_eos"] is None
    assert main(["inspect", str(tmp_path / "x")]) == 0
    assert "tokens are shown as numbers: " in capsys.readouterr().out
    assert (
        content_of(capsys, tmp_path / "x", "--tokenizer", "byte", "--document", "1")["samples"][0]["parts"][0]["text"]
        == "\x05\x06"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none.idx is missing"),
        (["x", "--document", "5"], "--document must be between 0 and 4, got 5."),
    ],
)
def test_what_is_not_there_is_one_message(prefix, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and message in err and err.count("\n") == 1


def test_bins_reach_from_the_shortest_to_the_longest():
    bins = histogram(np.array([1, 8, 15, 16]))
    assert [(each["from"], each["to"], each["documents"]) for each in bins] == [
        (1, 1, 1),
        (2, 3, 0),
        (4, 7, 0),
        (8, 15, 2),
        (16, 31, 1),
    ]


def test_it_needs_no_torch(prefix):
    code = (
        "import sys\nfrom megalite.commands.data import main\nmain(sys.argv[1:])\nprint({'torch', 'transformers'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(prefix)], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.endswith("set()\n")
