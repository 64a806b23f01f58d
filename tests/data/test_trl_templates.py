"""Every family that TRL has a training variant of: tokens and mask are TRL's by the rules of docs/finetuning.md, or the
template is rejected.

TRL's variant of a template marks what the assistant writes with {% generation %}, and transformers makes the mask from
it. Here the family's own template is read, without marks. TRL's templates are read from its package as files, without
importing it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megalite.data.chat.records import Conversation, RecordReader
from megalite.data.chat.template import ChatTemplate
from megalite.data.indexed import DataError
from megalite.data.tokenizer import tokenizers as tokenizing

(_PACKAGE,) = importlib.util.find_spec("trl").submodule_search_locations  # type: ignore[union-attr,misc]
TEMPLATES = Path(_PACKAGE) / "chat_templates"
FAMILIES = sorted(path.name.removesuffix("_training.jinja") for path in TEMPLATES.glob("*_training.jinja"))
SPECIAL = re.compile(
    r"<\|[^<>|\s']+\|?>|<[^<>|\s']+\|>|<｜[^｜\s]+｜>|</?(?:start_of_turn|end_of_turn|end_of_utterance|sop|s)>|\[gMASK\]"
)
PARTS = ("idefics3", "llava_next", "smolvlm")
"""Their templates read contents that are lists of parts."""


def said(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


ASKED, AGAIN = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "3+3?"}
CALL = [{"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}]
ANSWER = {"role": "tool", "name": "add", "content": "4", "tool_call_id": "abcdefghi"}
INTEGER = {"type": "object", "properties": {"a": {"type": "integer", "description": "A."}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": INTEGER}}]
RECORDS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [ASKED, said("It is 4.")]},
    "two turns": {"messages": [ASKED, said("It is 4."), AGAIN, said("It is 6.")]},
    "reasoning": {"messages": [ASKED, said("It is 4.", reasoning_content="Two and two.")]},
    "a call": {"messages": [ASKED, said("", tool_calls=CALL), ANSWER, said("It is 4.")], "tools": TOOLS},
    "a call at the end": {"messages": [ASKED, said("", tool_calls=CALL)], "tools": TOOLS},
}

CALLS, ALL = ("a call", "a call at the end"), tuple(RECORDS)
WITHOUT_CALLS = "cohere cohere2 gemma gemma3 idefics3 lfm2 llama3 llava_next phi3 phi3_5 qwen2_5_vl smolvlm"
REJECTED = {
    **dict.fromkeys(WITHOUT_CALLS.split(), CALLS),
    # the prompt ends with <think>, and the messages have none
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3"), ALL),
    "qwen3": ("two turns", "a call"),  # earlier turns lose <think>
    **dict.fromkeys(("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), ("two turns",)),
}
HEADERS = {"gptoss": "<|start|>assistant", "muse_glimmer": "<|start|>assistant", "qwen2_5": "\n"}
"""What TRL counts although the generation prompt has it."""
ENDS = {"diffusion_gemma": "<|tool_response>"}
"""What TRL does not count although it ends a call, by the model's generation_config.json."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tokenizer with the control tokens of all families, one token a byte else."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = {text for path in TEMPLATES.glob("*.jinja") for text in SPECIAL.findall(path.read_text())} | {
        "<bos>",
        "<|endoftext|>",
    }
    # Phi-3's takes in the line break after it
    raw.add_special_tokens([AddedToken(text, special=True, rstrip=text == "<|end|>") for text in sorted(texts)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<|endoftext|>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory) -> tokenizing.Tokenizer:
    return tokenizing.load(directory)


@pytest.fixture(scope="module")
def theirs(directory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def read(record: dict[str, Any], as_text: bool = True) -> Conversation:
    """The conversation in a record, with the arguments of its calls as JSON text, as OpenAI gives them, or as they
    are."""
    written = json.loads(json.dumps(record))
    for message in written["messages"] if as_text else ():
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    parsed = RecordReader().read(written, "here")
    assert isinstance(parsed, Conversation)
    return parsed


def expected(theirs: Any, family: str, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens and mask by TRL's variant of the template, which reads arguments that are objects."""
    messages = record["messages"]
    if family in PARTS:
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    source = (TEMPLATES / f"{family}_training.jinja").read_text()
    options = {"chat_template": source, "return_dict": True, "return_assistant_tokens_mask": True}
    result = theirs.apply_chat_template(messages, tools=record.get("tools"), **options)
    return result["input_ids"], result["assistant_masks"]


def by_our_rules(theirs: Any, family: str, tokens: list[int], mask: list[int]) -> list[int]:
    """TRL's mask without headers, without white space after the token that ends a turn, and with that token."""
    ids = {text: theirs.convert_tokens_to_ids(text) for text in theirs.get_added_vocab()}
    control, mask = set(ids.values()), [*mask]
    header = theirs.encode(HEADERS.get(family, ""), add_special_tokens=False)
    for i, counted in enumerate([*mask]):
        if counted and (i == 0 or not mask[i - 1]) and tokens[i : i + len(header)] == header:
            mask[i : i + len(header)] = [0] * len(header)
        blank = i > 0 and tokens[i - 1] in control and theirs.decode([tokens[i]]).isspace()
        if counted and blank and (i + 1 == len(mask) or not mask[i + 1]):
            mask[i] = 0
    return [int(counted or token == ids.get(ENDS.get(family, ""))) for token, counted in zip(tokens, mask, strict=True)]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_mask_are_those_of_trl(family, name, tokenizer, theirs):
    template = ChatTemplate(tokenizer, (TEMPLATES / f"{family}.jinja").read_text(), require_end=True)
    conversation = read(RECORDS[name])
    if name in REJECTED.get(family, ()):
        with pytest.raises(
            DataError,
            match=rf"^(Could not locate .*)?the chat template \(hash {template.hash}\) passed for",
        ):
            template.render(conversation.messages, tools=conversation.tools)
        return
    tokens, mask = expected(theirs, family, RECORDS[name])
    assert 0 < sum(mask) < len(mask)
    assert template.render(conversation.messages, tools=conversation.tools) == (
        tokens,
        by_our_rules(theirs, family, tokens, mask),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_variant_of_trl_the_mask_is_exactly_that_of_trl(family, tokenizer, theirs):
    template, conversation = (
        ChatTemplate(tokenizer, (TEMPLATES / f"{family}_training.jinja").read_text()),
        read(RECORDS["two turns"]),
    )
    assert template.render(conversation.messages) == expected(theirs, family, RECORDS["two turns"])


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if "a call at the end" not in REJECTED.get(family, ())]
)
def test_arguments_as_text_and_as_objects_give_the_same(family, tokenizer):
    """Also where the template itself tests for text, as Qwen 3's."""
    template = ChatTemplate(tokenizer, (TEMPLATES / f"{family}.jinja").read_text())
    as_text, as_object = (read(RECORDS["a call at the end"], each) for each in (True, False))
    assert template.render(as_text.messages, tools=TOOLS) == template.render(as_object.messages, tools=TOOLS)


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call><|im_end|>'),
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call><|im_end|>'),
        ("llama3_1", '{"name": "add", "parameters": {"a": 1, "b": "é"}}<|eot_id|>'),
        ("gptoss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": "é"}<|call|>'),
    ],
)
def test_arguments_are_learned_as_an_object(family, written, tokenizer):
    template, call = (
        ChatTemplate(tokenizer, (TEMPLATES / f"{family}.jinja").read_text()),
        read(RECORDS["a call at the end"]),
    )
    tokens, mask = template.render(call.messages, tools=call.tools)
    counted = [token for token, each in zip(tokens, mask, strict=True) if each]
    assert tokenizer.spell(counted).removeprefix("<think>\n\n</think>\n\n") == written
