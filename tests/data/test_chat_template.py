"""Chat templates to tokens and masks, the forms of chat data, and tools/prepare_data.py --chat from input to token
file."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megalite.commands import prepare as prepare_data
from megalite.data.chat.records import RecordReader
from megalite.data.chat.template import ChatTemplate
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.sources import open_inputs
from megalite.data.tokenizer import tokenizers as tokenizing
from tests.data.chats import (
    CHATML,
    CONTROLS,
    ENDS_TWICE,
    LONG,
    NEXT_ROLE_ENDS,
    PLAIN,
    ROLE_CONTROLS,
    SHORT,
    TEMPLATES,
    unmarked,
    write_lines,
    write_tokenizer,
)

FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": SHORT, "id": 1},
    "alpaca": {"instruction": "Add", "input": "1+1", "output": "It is 2."},
    "sharegpt": {"conversations": [{"from": "human", "value": "Add\n\n1+1"}, {"from": "gpt", "value": "It is 2."}]},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture(scope="module")
def tokenizer(directory) -> tokenizing.Tokenizer:
    return tokenizing.load(directory)


# ---- templates


def harmless(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Without words that read like control tokens, for which transformers takes them."""
    return [{**message, "content": message["content"].replace("<|im_", "<im_")} for message in messages]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_mask_are_those_of_transformers(name, directory, tokenizer):
    """With marks transformers says which tokens are the assistant's; without, we find the same ones."""
    from transformers import AutoTokenizer

    options = {"chat_template": TEMPLATES[name], "return_dict": True, "return_assistant_tokens_mask": True}
    # of which headers have some, too
    short = [[SHORT[0], {"role": "assistant", "content": said}] for said in ("", "s", " A\n")]
    for messages in (harmless(LONG), SHORT, *short):
        theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, **options)
        assert 0 < sum(theirs["assistant_masks"]) < len(theirs["input_ids"]) / 2
        for source in (TEMPLATES[name], unmarked(TEMPLATES[name])):
            assert ChatTemplate(tokenizer, source).render(messages) == (theirs["input_ids"], theirs["assistant_masks"])


def test_the_byte_tokenizer_has_a_template_of_its_own():
    tokens, counts = ChatTemplate(tokenizing.load("byte")).render(SHORT)
    assert tokens == [*b"<|user|>\nAdd\n\n1+1\n<|assistant|>\nIt is 2.", 256, *b"\n"]
    assert [token for token, counted in zip(tokens, counts, strict=True) if counted] == [*b"It is 2.", 256]


@pytest.mark.parametrize("source", [CHATML, unmarked(CHATML), None], ids=["marks", "no marks", "byte"])
def test_what_is_said_never_becomes_a_control_token(source, tokenizer):
    tokenizer = tokenizer if source else tokenizing.load("byte")
    template = ChatTemplate(tokenizer, source)
    (start, *_), end = template.prompt(SHORT), template.end_of_turn()
    tokens, counts = template.render(LONG)
    assert tokens.count(end) == (len(LONG) if source else 2)
    if source:
        assert tokens.count(start) == len(LONG) and end == tokenizer.encode_rendered("<|im_end|>")[0][0]
    counted = [token for token, counted in zip(tokens, counts, strict=True) if counted]
    turns = [tokenizer.encode(message["content"]) for message in LONG if message["role"] == "assistant"]
    assert counted == [*turns[0], end, *turns[1], end], "each turn as it was said, and its end"


@pytest.mark.parametrize("source", [CHATML, unmarked(CHATML)], ids=["marks", "no marks"])
def test_what_counts(source, tokenizer):
    template = ChatTemplate(tokenizer, source)
    tokens, counts = template.render(LONG)
    last = template.render(LONG, loss_on="last")
    first = len(template.prompt(LONG[:-1]))
    assert last == (tokens, [0] * first + counts[first:])
    assert template.render(LONG, loss_on="all") == (tokens, [1] * len(tokens))
    assert template.prompt(LONG[:-1]) == tokens[:first], "generation sees what training saw"


REWRITING = {
    "earlier turns lose something": "{% for message in messages %}<{{ message['role'] }}>"
    "{% if loop.last and message['role'] == 'assistant' %}think {% endif %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "the prompt is another header": "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}<assistant>think {% endif %}",
    "what is said is not written": "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | upper "
    "}}{% endfor %}",
}


@pytest.mark.parametrize("name", REWRITING)
def test_a_template_whose_turns_can_not_be_found_is_refused(name, tokenizer):
    template = ChatTemplate(tokenizer, REWRITING[name])
    with pytest.raises(DataError, match="differently when others follow.*--chat_template FILE.*--loss_on all"):
        template.render(LONG)
    assert all(template.render(LONG, loss_on="all")[1])


# ---- ends of turns

ASKED, FOUR, SIX = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "assistant", "content": "It is 6."},
)
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
CLOSED_CALLS = NEXT_ROLE_ENDS.replace("{% endfor %}{% endfor %}", "</call>{% endfor %}{% endfor %}")


def counted(
    template: ChatTemplate, tokenizer: tokenizing.Tokenizer, messages: list[dict[str, Any]], **options: Any
) -> str:
    """The rendered messages; what counts stands in brackets."""
    tokens, mask = template.render(messages, **options)
    runs = groupby(zip(tokens, mask, strict=True), lambda pair: pair[1])
    return "".join(
        ("[{}]" if each else "{}").format(tokenizer.spell([token for token, _ in run])) for each, run in runs
    )


def of_roles(directory: Path, ends: list[str] | None = None) -> tokenizing.Tokenizer:
    """A tokenizer with a control token for each role, whose generation_config.json lists the ends."""
    write_tokenizer(directory, controls=(*CONTROLS, *ROLE_CONTROLS))
    if ends is not None:
        loaded = tokenizing.load(directory)
        ids = [loaded.encode_rendered(end)[0][0] for end in ends]
        (directory / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ids[0] if len(ids) == 1 else ids})
        )
    return tokenizing.load(directory)


@pytest.mark.parametrize(
    ("source", "ends", "messages", "expected"),
    [
        (
            NEXT_ROLE_ENDS,
            None,
            [ASKED, FOUR, ASKED, SIX],
            "<|user|>?<|assistant|>[It is 4.<|user|>]?<|assistant|>[It is 6.<|user|>]",
        ),
        (NEXT_ROLE_ENDS, ["</s>", "<|user|>", "<|tool|>"], [ASKED, FOUR], "<|user|>?<|assistant|>[It is 4.<|user|>]"),
        (NEXT_ROLE_ENDS, None, [ASKED, FOUR, ASKED], "<|user|>?<|assistant|>[It is 4.<|user|>]?"),
        (
            NEXT_ROLE_ENDS,
            None,
            [ASKED, CALLED],
            '<|user|>?<|assistant|>[{"name": "add", "arguments": {"a": 1}}<|tool|>]',
        ),
        (
            NEXT_ROLE_ENDS,
            ["</s>", "<|user|>"],
            [ASKED, CALLED],
            '<|user|>?<|assistant|>[{"name": "add", "arguments": {"a": 1}}<|user|>]',
        ),
        (
            CLOSED_CALLS,
            None,
            [ASKED, CALLED],
            '<|user|>?<|assistant|>[{"name": "add", "arguments": {"a": 1}}</call><|tool|>]',
        ),
        (
            CLOSED_CALLS,
            ["</s>", "</call>"],
            [ASKED, CALLED, {"role": "tool", "content": "4"}, FOUR],
            '<|user|>?<|assistant|>[{"name": "add", "arguments": {"a": 1}}</call>]<|tool|>4<|assistant|>[It is '
            "4.<|user|>]",
        ),
        (
            ENDS_TWICE,
            None,
            [ASKED, FOUR, ASKED, SIX],
            "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[It is 4.<|im_end|>]\n"
            "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[It is 6.<|im_end|>]\n[</s>]",
        ),
        (
            ENDS_TWICE,
            None,
            [ASKED, FOUR, ASKED],
            "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[It is "
            "4.<|im_end|>]\n<|im_start|>user\n?<|im_end|>\n</s>",
        ),
        (
            ENDS_TWICE.replace("eos_token", "' \n' + eos_token"),
            None,
            [ASKED, FOUR, ASKED, SIX],
            "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[It is 4.<|im_end|>]\n"
            "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n[It is 6.<|im_end|>]\n \n[</s>]",
        ),
        (
            unmarked(CHATML).replace("+ '<|im_end|>'", "+ '\n<|im_end|>'"),
            None,
            [ASKED, FOUR],
            "<|im_start|>user\n?\n<|im_end|>\n<|im_start|>assistant\n[It is 4.\n<|im_end|>]\n",
        ),
    ],
)
def test_the_end_of_a_turn_counts(source, ends, messages, expected, tmp_path):
    tokenizer = of_roles(tmp_path, ends)
    template = ChatTemplate(tokenizer, source, require_end=True)
    assert counted(template, tokenizer, messages) == expected
    everything = counted(template, tokenizer, messages, loss_on="all")
    assert everything == f"[{expected.translate({ord('['): None, ord(']'): None})}]", "the added end counts, too"


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (NEXT_ROLE_ENDS, "<|user|>"),
        (ENDS_TWICE, "<|im_end|>"),
        (unmarked(CHATML), "<|im_end|>"),
        (CHATML.replace("'<|im_end|>' }}{% endg", "'<|im_end|>\n' }}{% endg"), "<|im_end|>"),
        (CHATML.replace("+ '<|im_end|>' }}{% endg", "}}{% endg"), None),  # the model does not learn to say it
        (PLAIN, None),
        (unmarked(PLAIN), None),
    ],
)
def test_generation_stops_where_a_turn_ends(source, end, tmp_path):
    """At a token of its own, and never at a line break."""
    tokenizer = of_roles(tmp_path)
    assert ChatTemplate(tokenizer, source).end_of_turn() == (end and tokenizer.encode_rendered(end)[0][0])


NO_END = {
    "none": unmarked(PLAIN),
    "none marked": PLAIN,
    "only that of the last turn": "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if loop.last and not add_generation_prompt else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    "only that of the last turn, after a line break": "{% for message in messages %}{{ message['role'] + ': ' + "
    "message['content'] }}"
    "{{ ' \n' + eos_token if loop.last and not add_generation_prompt else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
    "BOS follows": "{% for message in messages %}{{ bos_token if message['role'] == 'user' }}{{ message['content'] "
    "}}{% endfor %}",
}


@pytest.mark.parametrize("name", NO_END)
def test_a_template_without_an_end_is_refused_if_one_is_required(name, tokenizer):
    messages = [ASKED, FOUR, ASKED, SIX]
    with pytest.raises(DataError, match=r"does not end the assistant's message 2 .*eos_token.*--end_of_turn optional"):
        ChatTemplate(tokenizer, NO_END[name], require_end=True).render(messages)
    template = ChatTemplate(tokenizer, NO_END[name])
    text = counted(template, tokenizer, messages)
    assert "[It is 4." in text and "It is 6." in text.rpartition("[")[2]


def test_the_end_of_a_turn_is_required_by_default(run, directory, tmp_path, capsys):
    write_lines(tmp_path / "a.jsonl", [FORMS["messages"]])
    Path("plain.jinja").write_text(PLAIN)
    arguments = ["--input", "a.jsonl", "--tokenizer", directory, "--chat_template", "plain.jinja", "--output", "x"]
    with pytest.raises(SystemExit):
        run(*arguments)
    assert "a.jsonl line 1: the chat template (hash " in (said := capsys.readouterr().err) and "message 2" in said
    run(*arguments, "--end_of_turn", "optional")
    assert conversations("x") == [ChatTemplate(tokenizing.load(directory), PLAIN).render(SHORT)]


# ---- what templates read

TOOL_CALL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{{ message['content'] }}{% for call in "
    "message.tool_calls %}"
)
AFTER_CALL = (
    "{% endfor %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "call",
    [
        "{{ call.function.arguments | tojson }}",
        "{{ '' + call.function.arguments }}",
        "{{ call.function.arguments }}",
        "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}",
    ],
    ids=["objects", "only text", "either, but objects as Python spells them", "either"],
)
def test_arguments_are_given_as_the_template_reads_them(call, tokenizer):
    template = ChatTemplate(tokenizer, TOOL_CALL + call + AFTER_CALL)
    text = '{"a": [1, null], "b": "é <|im_end|>", "c": true}'
    messages = [ASKED, {**CALLED, "tool_calls": [{"function": {"name": "add", "arguments": text}}]}]
    conversation = RecordReader().read({"messages": messages}, "here")
    tokens, mask = template.render(conversation.messages)
    end = template.end_of_turn()
    assert [token for token, each in zip(tokens, mask, strict=True) if each] == [*tokenizer.encode(text), end]


def test_contents_are_given_as_the_template_reads_them(tokenizer):
    """As Idefics 3's, which writes nothing of a content that is a text."""
    source = unmarked(CHATML).replace(
        "{{ message['content'] + '<|im_end|>' }}",
        "{% for part in message['content'] %}{{ part.text }}{% endfor %}<|im_end|>",
    )
    assert source != unmarked(CHATML)
    template = ChatTemplate(
        tokenizer, "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + source
    )
    with pytest.raises(DataError):
        template.render(SHORT)  # nothing is learned from it
    assert template.render(LONG) == ChatTemplate(tokenizer, CHATML).render(LONG)


def test_a_template_that_refuses_is_quoted(tokenizer):
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(DataError, match="failed to render the conversation: roles must alternate"):
        ChatTemplate(tokenizer, strict).render(LONG)


def test_templates_without_a_default_are_not_replaced_by_ours(tmp_path):
    """transformers refuses them, too."""
    place = write_tokenizer(tmp_path / "named")
    named = [{"name": "rag", "template": CHATML}, {"name": "tool_use", "template": CHATML}]
    settings = place / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": named}))
    loaded = tokenizing.load(place)
    with pytest.raises(ValueError, match="no default specified"):
        loaded._tokenizer.get_chat_template()
    with pytest.raises(
        DataError,
        match=r"\(rag, tool_use\) but no default one. Choose one with --chat_template FILE",
    ):
        ChatTemplate(loaded)
    assert ChatTemplate(loaded, CHATML).source == CHATML


def test_other_keys_of_a_message_reach_the_template(tokenizer):
    source = "{{ tools[0] | list | last }}{{ tools[0]['name'] }}"
    source += "{% for message in messages %}{{ message['name'] or message.tool_calls[0]['id'] }}{% endfor %}"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "call"}], "name": None}
    record = {
        "messages": [{"role": "user", "content": "x", "name": "Ada"}, calls],
        "tools": [{"name": "add<s>", "</s>": 1}],
    }
    conversation = RecordReader().read(record, "here")
    tokens, _ = ChatTemplate(tokenizer, source).render(conversation.messages, tools=conversation.tools, loss_on="all")
    assert tokens == tokenizer.encode("</s>add<s>Adacall"), "control tokens neither in values nor in keys"


def test_workers_get_and_give_all_of_it(directory, tokenizer, tmp_path):
    """What the pool sends to a worker and back is what one process computes."""
    path = write_lines(tmp_path / "a.jsonl", [*FORMS.values(), {"messages": LONG}])
    (source,) = open_inputs([str(path)], exclude=[], file_format="auto", text_key=None, split="train")
    (task,) = source.tasks()
    chats = Chats(unmarked(CHATML), "last", 400)
    sent, received = (pickle.loads(pickle.dumps(each)) for each in ((chats, task), chats.encode(task, tokenizer)))
    again = sent[0].encode(sent[1], tokenizing.load(directory))
    for name in ("tokens", "mask", "sizes"):
        assert getattr(again, name).tolist() == getattr(received, name).tolist() != []
    assert again.forms == received.forms == set(FORMS)


# ---- the tool


@pytest.fixture
def run(monkeypatch, tmp_path, capsys) -> Callable[..., dict]:
    """run(*arguments) → the JSON result of prepare_data.py --chat, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> dict:
        command = ["prepare_data.py", "--chat", *map(str, arguments), "--workers", "1", "--json", "--overwrite"]
        monkeypatch.setattr("sys.argv", command)
        importlib.reload(prepare_data).main()
        return json.loads(capsys.readouterr().out)

    return call


def conversations(prefix: str) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of each document."""
    file = IndexedTokens(prefix)
    assert file.loss is not None and file.loss.tokens.dtype == "u1"
    ends = file.sizes.cumsum().tolist()
    return [
        (file.tokens[end - size : end].tolist(), file.loss.tokens[end - size : end].tolist())
        for end, size in zip(ends, file.sizes.tolist(), strict=True)
    ]


def test_the_forms_give_the_same_documents(run, directory, tmp_path):
    """One record of each, as lines, as a list in a .json, as rows of a .parquet and of a dataset that `datasets`
    loads."""
    import pyarrow
    from pyarrow import parquet

    template = ChatTemplate(tokenizing.load(directory))
    expected = template.render(SHORT)
    write_lines(tmp_path / "a.jsonl", list(FORMS.values()))
    (tmp_path / "b.json").write_text(json.dumps(list(FORMS.values())))
    (tmp_path / "named").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([FORMS["messages"]] * 3), tmp_path / "named" / "train.parquet")
    for source in ("a.jsonl", "b.json", "named/train.parquet", "hf:named"):
        result = run("--input", source, "--tokenizer", directory, "--output", "x")
        assert conversations("x") == [expected] * 3, source
        tokens, counts = len(expected[0]), sum(expected[1])
        assert (result["documents"], result["tokens"], result["loss_tokens"], result["longest"]) == (
            3,
            3 * tokens,
            3 * counts,
            tokens,
        )
    run("--input", "a.jsonl", "--tokenizer", directory, "--output", "x")
    content = json.loads(Path("x.json").read_text())["chat"]
    assert (
        content["forms"] == sorted(FORMS) and content["loss_on"] == "assistant" and content["loss_tokens"] == 3 * counts
    )
    assert (content["template_hash"], content["template"], content["longest"]) == (
        template.hash,
        template.source,
        tokens,
    )


def test_long_conversations_and_those_without_loss_are_counted(run, tmp_path):
    silent = {"messages": SHORT[:1]}
    write_lines(tmp_path / "a.jsonl", [FORMS["alpaca"], {"messages": LONG}, silent])
    whole = ChatTemplate(tokenizing.load("byte")).render(SHORT)
    length = len(whole[0])
    for option, documents in (("drop", 1), ("truncate", 1)):
        result = run(
            "--input",
            "a.jsonl",
            "--tokenizer",
            "byte",
            "--max_length",
            str(length),
            "--too_long",
            option,
            "--output",
            "x",
        )
        assert (result["documents"], result["too_long"]) == (documents, 1)
        assert result["without_loss"] == (1 if option == "drop" else 2), "the beginning of the long one holds no answer"
        assert conversations("x") == [whole] and result["packed_rows"] == 1
    run(
        "--input",
        "a.jsonl",
        "--tokenizer",
        "byte",
        "--max_length",
        str(length - 2),
        "--too_long",
        "truncate",
        "--output",
        "x",
    )
    assert conversations("x") == [(whole[0][:-2], whole[1][:-2])]
    result = run("--input", "a.jsonl", "--tokenizer", "byte", "--loss_on", "all", "--output", "x")
    assert (result["documents"], result["without_loss"], result["loss_tokens"]) == (3, 0, result["tokens"])


def test_a_template_of_ones_own(run, directory, tmp_path):
    write_lines(tmp_path / "a.jsonl", [FORMS["messages"]])
    Path("own.jinja").write_text(unmarked(TEMPLATES["llama 3"]))
    run("--input", "a.jsonl", "--tokenizer", directory, "--chat_template", "own.jinja", "--output", "x")
    assert conversations("x") == [ChatTemplate(tokenizing.load(directory), TEMPLATES["llama 3"]).render(SHORT)]


def test_text_in_place_of_conversations_leaves_no_mask_behind(run, tmp_path, monkeypatch, capsys):
    write_lines(tmp_path / "a.jsonl", [FORMS["messages"]])
    run("--input", "a.jsonl", "--tokenizer", "byte", "--output", "x")
    assert sorted(path.name for path in tmp_path.glob("x.*")) == [
        "x.bin",
        "x.idx",
        "x.json",
        "x.loss.bin",
        "x.loss.idx",
    ]
    write_lines(tmp_path / "b.jsonl", [{"text": "a"}])
    again = ["--input", "b.jsonl", "--tokenizer", "byte", "--output", "x", "--workers", "1", "--overwrite"]
    monkeypatch.setattr("sys.argv", ["prepare_data.py", *again])
    prepare_data.main()
    assert sorted(path.name for path in tmp_path.glob("x.*")) == ["x.bin", "x.idx", "x.json"]
    assert IndexedTokens("x").loss is None


BAD = {
    "no form": ([{"text": "a"}], "a.jsonl line 2 is not a conversation; its keys are text"),
    "no object": ([["a"]], "a.jsonl line 2 is a list, not an object"),
    "no list": ([{"messages": "a"}], "line 2: messages is not a list of messages"),
    "no text": (
        [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
        "line 2: message 1 of messages has a part of unsupported type image. Only text",
    ),
    "mixed keys": (
        [{"conversations": [{"from": "human", "value": "a"}, {"role": "gpt"}]}],
        "message 2 of conversations must have strings in from",
    ),
    "unknown speaker": (
        [{"conversations": [{"from": "bing", "value": "a"}]}],
        "line 2: message 1 of conversations has an unknown role 'bing'",
    ),
    "half an instruction": ([{"instruction": "a", "input": "b"}], "its keys are instruction, input"),
    "number": ([{"instruction": "a", "output": 2}], "line 2: output must be a string, got int"),
    "refused by the template": (
        [{"messages": [{"role": "system", "content": "no"}]}],
        "a.jsonl line 2: the chat template (hash ",
    ),
}
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
OPTIONS = {
    "text file": (["--input", "b.txt"], "--input b.txt is a text file, but --chat and --preference require records"),
    "json is no list": (["--input", "b.json"], "--input b.json is not a list of records"),
    "training a tokenizer": (
        ["--input", "ok.jsonl", "--train_tokenizer", "300"],
        "--train_tokenizer is not supported with --chat",
    ),
    "too short": (["--input", "ok.jsonl", "--max_length", "1"], "--max_length must be at least 2, got 1"),
    "no length": (
        ["--input", "ok.jsonl", "--too_long", "truncate"],
        "--too_long truncate requires --max_length",
    ),
    "no template": (
        ["--input", "ok.jsonl", "--chat_template", "none.jinja"],
        "--chat_template none.jinja: No such file",
    ),
    "template of bytes": (
        ["--input", "ok.jsonl", "--chat_template", "bytes.jinja"],
        "bytes.jinja: it is not UTF-8",
    ),
    "nothing left": (
        ["--input", "ok.jsonl", "--max_length", "2"],
        "1 conversations were longer than --max_length 2, 0 had no trained token",
    ),
}


@pytest.mark.parametrize("name", [*BAD, *OPTIONS])
def test_bad_input(name, run, directory, tmp_path, capsys):
    write_lines(tmp_path / "ok.jsonl", [FORMS["messages"]])
    (tmp_path / "b.txt").write_text("a")
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "strict.jinja").write_text(STRICT)
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    if name in BAD:
        records, message = BAD[name]
        write_lines(tmp_path / "a.jsonl", [FORMS["messages"], *records])
        arguments = ["--input", "a.jsonl", "--chat_template", "strict.jinja", "--tokenizer", directory]
    else:
        arguments, message = OPTIONS[name]
        arguments = [*arguments, *([] if "--train_tokenizer" in arguments else ["--tokenizer", directory])]
    with pytest.raises(SystemExit) as ended:
        run(*arguments, "--output", "x")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and "Traceback" not in said
    assert not list(tmp_path.glob("*x.*"))
