"""Records to conversations: every form, mapped keys, weights, parts of contents, and what each makes count in the
loss."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.commands.prepare import main
from megalite.data.chat.records import BadRecord, PromptCompletion, RecordReader, parsed_keys
from megalite.data.chat.template import ChatTemplate
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.tokenizer import tokenizers as tokenizing
from tests.data.chats import CHATML, LONG, SHORT, TEMPLATES, unmarked, write_lines, write_tokenizer

READER = RecordReader()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> tokenizing.Tokenizer:
    return tokenizing.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys) -> Callable[..., dict]:
    """run(*arguments) → the JSON result of prepare_data.py with the byte tokenizer, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> dict:
        command = [
            "prepare_data.py",
            *arguments,
            "--tokenizer",
            "byte",
            "--output",
            "x",
            "--workers",
            "1",
            "--json",
            "--overwrite",
        ]
        monkeypatch.setattr(sys, "argv", command)
        main()
        return json.loads(capsys.readouterr().out)

    return call


def learned(prefix: str = "x") -> list[bytes]:
    """The bytes that count, of each document; EOS is written as a dollar."""
    file, texts, at = IndexedTokens(prefix), [], 0
    assert file.loss is not None
    for size in file.sizes.tolist():
        pairs = zip(file.tokens[at : at + size].tolist(), file.loss.tokens[at : at + size].tolist(), strict=True)
        texts.append(b"".join(bytes([token]) if token < 256 else b"$" for token, counts in pairs if counts))
        at += size
    return texts


def counted(
    template: ChatTemplate, tokenizer: tokenizing.Tokenizer, messages: list[dict[str, Any]], **options: Any
) -> str:
    tokens, mask = template.render(messages, **options)
    return tokenizer.decode([token for token, counts in zip(tokens, mask, strict=True) if counts])


# ---- weights


@pytest.mark.parametrize("name", TEMPLATES)
def test_weights_are_of_their_turns(name, tokenizer):
    """With marks and without, what counts beside a turn of weight 0 is the other turn alone; the tokens are the
    same."""
    for source in (TEMPLATES[name], unmarked(TEMPLATES[name])):
        template = ChatTemplate(tokenizer, source)
        tokens, whole = template.render(LONG)
        assert template.render(LONG, weights={}) == (tokens, whole)
        first, second = (template.render(LONG, weights={i: 0})[1] for i in (4, 2))
        assert sum(first) and sum(second) and [a + b for a, b in zip(first, second, strict=True)] == whole
        assert first.index(1) < second.index(1)
        assert template.render(LONG, loss_on="last") == (tokens, second)
        assert not any(template.render(LONG, loss_on="last", weights={4: 0})[1])
        rest = template.render(LONG, loss_on="all", weights={4: 0})[1]
        assert [a + b for a, b in zip(rest, second, strict=True)] == [1] * len(tokens)
        of_both = template.render(LONG, weights={2: 0.25, 4: -2})[1]
        assert of_both == [0.25 * a - 2 * b for a, b in zip(first, second, strict=True)]
        rest = template.render(LONG, loss_on="all", weights={4: -2})[1]
        assert rest == [1 - 3 * b for b in second]


def test_weights_are_read_and_do_not_reach_the_template(run, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    turns += [{"role": "user", "content": "c", "weight": 0}, {"role": "assistant", "content": "d", "weight": 1}]
    write_lines(tmp_path / "a.jsonl", [{"messages": turns}, {"messages": [{**turn, "weight": None} for turn in turns]}])
    assert "weight" not in READER.read({"messages": turns}, "here").messages[1]  # type: ignore[union-attr]
    run("--chat", "--input", "a.jsonl")
    assert learned() == [b"d$", b"b$d$"]
    run("--chat", "--input", "a.jsonl", "--loss_on", "last")
    assert learned() == [b"d$", b"d$"]
    renamed = [{**turns[0]}, {"role": "assistant", "content": "b", "training": False}, *turns[2:]]
    write_lines(tmp_path / "b.jsonl", [{"prompt": turns[:2], "completion": turns[2:]}, {"messages": renamed}])
    run("--chat", "--input", "b.jsonl", "--keys", "train=training")
    assert learned() == [b"d$", b"d$"]
    loss = IndexedTokens("x").loss
    assert loss is not None and loss.tokens.dtype == np.uint8, "a mask, if all weights are 0 or 1"


def test_other_weights_are_stored_as_numbers(run, tmp_path):
    """The first of them, in a later task, makes numbers of what was stored before."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": -0.5}]
    plain = {"messages": [{**turn, "weight": None} for turn in turns]}
    write_lines(tmp_path / "a.jsonl", [plain, plain])
    write_lines(
        tmp_path / "b.jsonl",
        [{"prompt": turns[:1], "completion": [turns[1] | {"weight": 1e30}]}, {"messages": turns}],
    )
    result = run("--chat", "--input", "a.jsonl", "b.jsonl")
    file = IndexedTokens("x")
    assert file.loss is not None and file.loss.tokens.dtype == np.float32
    assert json.loads(Path("x.json").read_text())["chat"]["loss_dtype"] == "float32"
    weights = file.loss.tokens.reshape(4, -1)
    expected = np.float32([1, 1, 1e30, -0.5])
    assert (weights[:, -3:-1] == expected[:, None]).all() and result["loss_tokens"] == np.count_nonzero(weights) == 8


@pytest.mark.parametrize(
    ("role", "weight", "reason"),
    [
        ("assistant", "1", "has an invalid weight '1'"),
        ("assistant", True, "has an invalid weight True"),
    ]
    + [("assistant", -1e39, "has an invalid weight -1e.39"), ("user", 0.5, "has weight 0.5, but its role is user")]
    + [("user", 1, "has weight 1, but its role is user"), ("assistant", float("nan"), "has an invalid weight nan")],
)
def test_other_weights_are_refused(role, weight, reason):
    record = {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": "b", "weight": weight}]}
    with pytest.raises(BadRecord, match=f"line 3: message 2 of messages {reason}"):
        READER.read(record, "line 3")
    for flags, problem in (
        ({"train": 1}, "invalid train 1"),
        ({"train": False, "weight": 0.5}, "has weight 0.5 and train false"),
        ({"train": True, "role": "user"}, "has train true, but its role is user"),
    ):
        turn = {"role": "assistant", "content": "b"} | flags
        with pytest.raises(BadRecord, match=problem):
            READER.read({"messages": [turn]}, "line 3")


# ---- prompts with completions


def test_a_pair_of_texts_is_learned_from_its_completion_on(run, tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"prompt": "The sky is", "completion": " blue.", "id": 7}])
    result = run("--chat", "--input", "a.jsonl")
    assert IndexedTokens("x").tokens.tolist() == [*b"The sky is blue.", 256], "no template, EOS at the end"
    assert learned() == [b" blue.$"] and result["forms"] == ["prompt-completion"]
    run("--chat", "--input", "a.jsonl", "--loss_on", "all")
    assert learned() == [b"The sky is blue.$"]


def test_a_pair_has_no_control_tokens_but_its_end(tokenizer):
    tokens, counts = ChatTemplate(tokenizer).pair("<|im_start|>a", "b</s>")
    assert tokens == [*tokenizer.encode("<|im_start|>ab</s>"), tokenizer.eos]
    assert (
        tokenizer.decode([token for token, each in zip(tokens, counts, strict=True) if each]) == "b</s>" and counts[-1]
    )


def test_a_pair_begins_as_its_tokenizer_begins_texts(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "adds_bos", True)
    tokens, counts = ChatTemplate(tokenizer).pair("a", "b")
    assert tokens == [tokenizer.bos, *tokenizer.encode("ab"), tokenizer.eos] and counts == [0, 0, 1, 1]


def test_a_pair_of_messages_is_learned_from_its_completion_on(run, tmp_path):
    """An assistant's turn in the prompt does not count, as in TRL."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answers = [
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f", "weight": 0},
    ]
    write_lines(tmp_path / "a.jsonl", [{"prompt": said, "completion": answers}])
    run("--chat", "--input", "a.jsonl")
    assert learned() == [b"d$"]
    tokens = IndexedTokens("x").tokens.tolist()
    unweighted = [{key: value for key, value in turn.items() if key != "weight"} for turn in said + answers]
    assert tokens == ChatTemplate(tokenizing.load("byte")).render(unweighted)[0]
    run("--chat", "--input", "a.jsonl", "--loss_on", "all")
    assert sum(map(len, learned())) == len(tokens) - 2, "all but the turn of weight 0"


def test_an_unwanted_completion_is_refused():
    assert READER.read({"prompt": "a", "completion": "b", "label": True}, "here") == PromptCompletion("a", "b")
    with pytest.raises(BadRecord, match="here has label=false"):
        READER.read({"prompt": "a", "completion": "b", "label": False}, "here")


def test_a_text_with_messages_is_no_pair():
    with pytest.raises(BadRecord, match="here: prompt and completion must be both strings .*, got str and list"):
        READER.read({"prompt": "a", "completion": SHORT}, "here")


def test_the_system_text_of_a_record_is_its_first_message():
    """It moves the numbers of the messages that do not count."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
    read = READER.read({"conversations": turns, "system": "Be brief."}, "here")
    assert read.messages[0] == {"role": "system", "content": "Be brief."} and read.weights == {2: 0}  # type: ignore[union-attr]
    own = READER.read({"messages": [{"role": "system", "content": "Own."}, *SHORT], "system": "Be brief."}, "here")
    assert [message["content"] for message in own.messages] == ["Own.", *(turn["content"] for turn in SHORT)]  # type: ignore[union-attr]


# ---- keys


def test_mapped_keys_are_read_as_the_formats_own():
    reader = RecordReader(parsed_keys("messages=dialog,role=speaker,content=text,prompt=q,completion=a"))
    renamed = {
        "dialog": [{"speaker": turn["role"], "text": turn["content"], "name": "Ada"} for turn in SHORT],
        "messages": "a label",
    }
    expected = READER.read({"messages": [{**turn, "name": "Ada"} for turn in SHORT]}, "here")
    assert reader.read(renamed, "here") == expected
    assert reader.read({"messages": SHORT}, "here") == READER.read({"messages": SHORT}, "here"), (
        "unmapped records are still read"
    )
    assert reader.read({"q": "x", "a": "y"}, "here") == PromptCompletion("x", "y")


def test_keys_by_option(run, tmp_path):
    write_lines(
        tmp_path / "a.jsonl", [{"dialog": [{"speaker": turn["role"], "text": turn["content"]} for turn in SHORT]}]
    )
    run("--chat", "--input", "a.jsonl", "--keys", "messages=dialog,role=speaker,content=text")
    assert learned() == [b"It is 2.$"]


@pytest.mark.parametrize("text", ["messages", "talk=messages", "messages=", "role=a,=b"])
def test_unknown_keys_are_refused(text):
    with pytest.raises(
        DataError, match="Invalid value for --keys: .* Expected KEY=NAME_IN_THE_RECORDS, where KEY is one of messages, "
    ):
        parsed_keys(text)


# ---- parts of a content


def test_text_parts_are_joined_and_others_are_refused_or_dropped(run, tmp_path, capsys):
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "what?"},
    ]
    texts = [part for part in parts if part["type"] == "text"]
    for content, reader in ((texts, READER), (parts, RecordReader(drop_other_parts=True))):
        read = reader.read({"messages": [{"role": "user", "content": content}]}, "here")
        assert read.messages == [{"role": "user", "content": "Look: what?"}]  # type: ignore[union-attr]
    write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": parts}, SHORT[1]]}])
    with pytest.raises(SystemExit):
        run("--chat", "--input", "a.jsonl")
    assert (
        "a.jsonl line 1: message 1 of messages has a part of unsupported type image_url. Only text"
        in capsys.readouterr().err
    )
    run("--chat", "--input", "a.jsonl", "--other_parts", "drop")
    assert learned() == [b"It is 2.$"]


# ---- tools


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def test_a_template_that_ignores_calls_or_tools_is_refused(tokenizer):
    ignoring, messages = ChatTemplate(tokenizer, unmarked(CHATML)), [SHORT[0], CALL]
    with pytest.raises(DataError, match="ignores the tool_calls of message 2, .* Use a --chat_template FILE"):
        ignoring.render(messages)
    with pytest.raises(DataError, match="ignores the record's tools"):
        ignoring.render(SHORT, tools=TOOLS)
    assert ignoring.render(SHORT, tools=[]) == ignoring.render(SHORT)
    writes_calls = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.tool_calls or '' }}{% endfor "
        "%}"
    )
    assert ChatTemplate(tokenizer, writes_calls).render(messages, loss_on="all")
    with pytest.raises(DataError, match="ignores the record's tools"):
        ChatTemplate(tokenizer, writes_calls).render(messages, tools=TOOLS, loss_on="all")
    assert ChatTemplate(tokenizer, "{{ tools }}" + writes_calls).render(messages, tools=TOOLS, loss_on="all")


def test_one_call_of_several_that_is_ignored_is_refused(tokenizer):
    """A template that writes calls only where there is no content."""
    source = "{% for message in messages %}<{{ message.role }}>{{ message.content or message.tool_calls }}{% endfor %}"
    with pytest.raises(DataError, match="ignores the tool_calls of message 4"):
        ChatTemplate(tokenizer, source).render([SHORT[0], CALL, SHORT[0], {**CALL, "content": "I add."}], loss_on="all")


def with_call(arguments: Any, **record: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"messages": [SHORT[0], {"role": "assistant", "content": None, "tool_calls": [call]}], **record}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
FUNCTION = {"name": "add", "parameters": SCHEMA}


@pytest.mark.parametrize(
    ("given", "tools"),
    [
        (json.dumps([{"type": "function", "function": FUNCTION}]), [{"type": "function", "function": FUNCTION}]),
        ([json.dumps({"type": "function", "function": FUNCTION})], [{"type": "function", "function": FUNCTION}]),
        ([{"type": "function", "function": json.dumps(FUNCTION)}], [{"type": "function", "function": FUNCTION}]),
        (
            [{"type": "function", "function": {**FUNCTION, "parameters": json.dumps(SCHEMA)}}],
            [{"type": "function", "function": FUNCTION}],
        ),
        ([{**FUNCTION, "parameters": json.dumps(SCHEMA)}], [FUNCTION]),
        ("[]", []),
        ("", None),
        (None, None),
    ],
)
def test_tools_that_are_json_text_become_objects(given, tools):
    assert READER.read({"messages": SHORT, "tools": given}, "here").tools == tools  # type: ignore[union-attr]


def test_calls_that_are_json_text_become_objects():
    """A null in the text is kept; one that is an object's own was filled in by a table."""

    def arguments(record: dict[str, Any]) -> Any:
        return READER.read(record, "here").messages[1]["tool_calls"][0]["function"]["arguments"]  # type: ignore[union-attr]

    assert arguments(with_call('{"a": 1, "b": null}')) == {"a": 1, "b": None}
    assert arguments(with_call({"a": 1, "b": None})) == {"a": 1}
    record = with_call("{}")
    record["messages"][1]["tool_calls"] = json.dumps(record["messages"][1]["tool_calls"])
    assert arguments(record) == {} and READER.read(record, "here") == READER.read(with_call({}), "here")


def test_the_earlier_format_of_calls_is_read():
    """`functions`, `function_call` and the role `function`: templates know only `tools` and `tool_calls`."""
    answer = {"role": "function", "name": "add", "content": "2"}
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    conversation = READER.read({"messages": [SHORT[0], called, answer], "functions": [{"name": "add"}]}, "here")
    assert conversation.tools == [{"type": "function", "function": {"name": "add"}}]  # type: ignore[union-attr]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    expected = [SHORT[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {**answer, "role": "tool"}]
    assert conversation.messages == expected  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            with_call('{"a": 1'),
            r"line 3: message 2 of messages: arguments of call 1 \(add\) is not valid JSON \(.*\). Expected an object "
            r"or a JSON string",
        ),
        (
            with_call("[1]"),
            r"message 2 of messages: arguments of call 1 \(add\) must be an object, got list in JSON. Expected "
            r"an object",
        ),
        (with_call(""), "arguments of call 1 .*is not valid JSON"),
        (with_call(3), "arguments of call 1 .* must be an object, got int"),
        (
            {"messages": [{**CALL, "tool_calls": {"name": "add"}}]},
            "message 1 of messages: tool_calls must be a list, got dict",
        ),
        (
            {"messages": [{**CALL, "tool_calls": ["add"]}]},
            "message 1 of messages: call 1 of tool_calls is not valid JSON",
        ),
        ({"messages": SHORT, "tools": "add"}, "line 3: tools is not valid JSON"),
        (
            {"messages": SHORT, "tools": [{"function": {**FUNCTION, "parameters": "{"}}]},
            r"parameters of tool 1 \(add\) is not valid JSON",
        ),
        (
            {"prompt": SHORT[:1], "completion": SHORT[1:], "tools": "{}"},
            "tools must be a list, got dict in JSON",
        ),
    ],
)
def test_tools_and_calls_that_are_no_objects_are_refused(record, reason):
    with pytest.raises(BadRecord, match=reason):
        READER.read(record, "line 3")


# ---- CSV


def test_csv_rows_are_texts_or_records(run, tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffid,text\r\n1,"one, two\nthree"\r\n\r\n2,"say ""x"""\r\n')
    (tmp_path / "a.tsv").write_text("text\tid\nfour\t1\n")
    result = run("--input", "a.csv", "a.tsv")
    assert (
        IndexedTokens("x").tokens.tolist() == [*b"one, two\nthree", 256, *b'say "x"', 256, *b"four", 256]
        and result["documents"] == 3
    )
    (tmp_path / "b.csv").write_text("prompt,completion\nThe sky is, blue\n")
    (tmp_path / "c.csv").write_text("instruction,input,output\nAdd,1+1,It is 2.\nSay x,,x\n")
    with (tmp_path / "d.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(SHORT)]])
    run("--chat", "--input", "b.csv", "c.csv", "d.csv")
    assert learned() == [b" blue$", b"It is 2.$", b"x$", b"It is 2.$"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,id\na\n", "a.csv row 1 has 1 fields, but the header has 2"),
        ("", "a.csv has no header row"),
        ("body\na\n", "(--text_key)"),
    ],
)
def test_damaged_csv_is_refused(run, tmp_path, capsys, content, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(SystemExit):
        run("--input", "a.csv")
    assert message in capsys.readouterr().err


def test_the_text_of_a_source_tree_stays_text(run, tmp_path):
    Path("a.csv").write_text("x,y\n1,2\n")
    run("--input", "a.csv", "--format", "text")
    assert bytes(IndexedTokens("x").tokens[:-1].tolist()) == b"x,y\n1,2\n"
