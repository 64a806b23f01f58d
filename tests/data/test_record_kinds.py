"""Records of another kind than the command reads are reported at once, with the options that read them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.commands.prepare import main
from megalite.data.tokenizer import tokenizers as tokenizing
from tests.data.chats import SHORT, write_lines

TURNS = [{"speaker": "human", "text": "Add"}, {"speaker": "gpt", "text": "It is 2."}]
SHAREGPT = [{"from": "human", "value": "Add"}, {"from": "gpt", "value": "It is 2."}]
TEXT = "Call me Ishmael."
FOR_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": SHORT}, "look like conversations: add --chat."),
    ({"conversations": SHAREGPT, "id": 1}, "look like conversations: add --chat."),
    ({"instruction": "Add", "input": "", "output": "2"}, "look like conversations: add --chat."),
    ({"prompt": "The sky is", "completion": " blue."}, "look like conversations: add --chat."),
    ({"dialog": TURNS}, "look like conversations: add --chat --keys messages=dialog,role=speaker,content=text."),
    ({"conversation": SHORT}, "look like conversations: add --chat --keys messages=conversation."),
    ({"chat": SHAREGPT}, "look like conversations: add --chat --keys messages=chat."),
    (
        {"question": "1+1?", "answer": "2"},
        "look like conversations: add --chat --keys instruction=question,output=answer.",
    ),
    (
        {"prompt": "1+1?", "response": "2"},
        "look like conversations: add --chat --keys instruction=prompt,output=response.",
    ),
    (
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        "are preference pairs: add --preference, .* add --chat --keys completion=chosen.",
    ),
    (
        {"prompt": "1+1?", "chosen": SHORT, "rejected": SHORT},
        "are preference pairs: add --preference, .* add --chat --keys messages=chosen.",
    ),
    ({"chosen": "1+1? 2", "rejected": "1+1? 3"}, "are preference pairs: add --preference, .* add --text_key chosen."),
    ({"id": "7", "content": TEXT, "url": "a.b"}, "seem to have their text in content: add --text_key content."),
]
FOR_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"text": TEXT, "id": "7"}, "look like plain text: remove --chat."),
    ({"content": TEXT}, "look like plain text: remove --chat and add --text_key content."),
    (
        {"dialog": TURNS},
        "look like conversations with different key names: add --keys messages=dialog,role=speaker,content=text.",
    ),
    (
        {"question": "1+1?", "answer": "2"},
        "look like conversations with different key names: add --keys instruction=question,output=answer.",
    ),
    (
        {"prompt": SHORT[:1], "chosen": SHORT[1:], "rejected": SHORT[1:]},
        "are preference pairs: add --preference instead of.* add --keys completion=chosen.",
    ),
    (
        {"chosen": SHORT, "rejected": SHORT},
        "are preference pairs: add --preference instead of.* add --keys messages=chosen.",
    ),
    (
        {"chosen": "1+1? 2", "rejected": "1+1? 3"},
        "are preference pairs: add --preference instead of.* add --text_key chosen instead of --chat.",
    ),
]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys) -> Callable[..., str]:
    """run(*arguments) → standard output or, after status 2, standard error, in a directory of its own with the byte
    tokenizer."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(
            "sys.argv",
            ["megalite prepare", *arguments, "--tokenizer", "byte", "--output", "x", "--workers", "1", "--json"],
        )
        try:
            main()
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err
        return capsys.readouterr().out

    return call


@pytest.fixture
def without_tokenizer(monkeypatch) -> None:
    """Loading a tokenizer is an error."""

    def load(name: str) -> None:
        raise AssertionError(f"{name} is loaded before the records are read")

    monkeypatch.setattr(tokenizing, "load", load)


ROWS = [*(([], *row) for row in FOR_TEXTS), *((["--chat"], *row) for row in FOR_CHATS)]


@pytest.mark.usefixtures("without_tokenizer")
@pytest.mark.parametrize(("options", "record", "message"), ROWS)
def test_what_was_meant_is_proposed(options, record, message, run, tmp_path):
    write_lines(tmp_path / "a.jsonl", [record])
    said = run(*options, "--input", "a.jsonl")
    assert "a.jsonl line 1" in said and re.search(f"The records {message}", said), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


@pytest.mark.parametrize(("options", "record", "message"), ROWS)
def test_what_is_proposed_works(options, record, message, run, tmp_path):
    write_lines(tmp_path / "a.jsonl", [record])
    proposed = message.rstrip(".").rpartition("add ")[2].split() if "add " in message else []
    if "remove" in message or "instead" in proposed:
        options, proposed = [], [word for word in proposed if word not in ("instead", "of", "--chat")]
    result = json.loads(run(*options, *proposed, "--input", "a.jsonl"))
    assert result["documents"] == 1
    if "--preference" in message:
        result = json.loads(run("--preference", "--overwrite", "--input", "a.jsonl"))
        assert (result["documents"], result["chosen"]) == (2, 1)


@pytest.mark.usefixtures("without_tokenizer")
def test_columns_are_recognized(run, tmp_path):
    """By their names alone, where a table has no rows to look at."""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([{"messages": SHORT}]), tmp_path / "a.parquet")
    assert (
        "--text_key text not found in a.parquet. Available keys: messages. "
        "The records look like conversations: add --chat." in run("--input", "a.parquet")
    )
    assert re.search(
        "--text_key messages refers to a column of type list.* in a.parquet. The records look",
        run("--input", "a.parquet", "--text_key", "messages"),
    )
    Path("a.csv").write_text("prompt,completion\na,b\n")
    assert (
        "a.csv row 1 has no key text (--text_key). Available keys: prompt, completion. "
        "The records look like conversations: add --chat." in run("--input", "a.csv")
    )


@pytest.mark.usefixtures("without_tokenizer")
def test_bad_records_that_may_be_skipped_are_no_other_kind(run, tmp_path):
    conversation, text = {"messages": SHORT}, {"text": TEXT}
    write_lines(tmp_path / "a.jsonl", [conversation] * 4)
    said = run("--input", "a.jsonl", "--skip_bad", "3")
    assert (
        "The input starts with more bad records than --skip_bad 3 allows. "
        "The records look like conversations: add --chat." in said
    )
    assert said.count("has no key text") == 4
    write_lines(tmp_path / "a.jsonl", [conversation] * 3 + [text])
    with pytest.raises(AssertionError, match="byte is loaded"):
        run("--input", "a.jsonl", "--skip_bad", "3")


@pytest.mark.parametrize(
    "other",
    ["1234567890123456", "-1.5e-300", "2024-05-06 10:11:12", "2024-05-06T10:11:12Z", "https://a.b/c", "0a1b" * 9],
)
def test_what_a_table_holds_besides_text_is_not_proposed(run, other):
    """All columns of a .csv are strings."""
    Path("a.csv").write_text(f"id,body\n{other},Fog lay.\n")
    assert "seem to have their text in body: add --text_key body." in run("--input", "a.csv")
    Path("a.csv").write_text(f"id,body\n{other},\n")
    assert "Available keys: id, body. Choose the one with the text." in run("--input", "a.csv")


def test_what_cannot_be_guessed_is_left_to_the_user(run, tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"id": 7}])
    assert "Available keys: id. Choose the one with the text." in run("--input", "a.jsonl")
    assert "its keys are id. Expected one of messages" in run("--chat", "--input", "a.jsonl")
