"""A small Hugging Face tokenizer with ChatML's control tokens, chat templates with and without marks, and
conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA_3 = """{% for message in messages %}{{ (bos_token if loop.first else '') + '<|im_start|>' + message['role'] + '<|sep|>\\n\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] | trim + '<|im_end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|sep|>\\n\\n' }}{% endif %}"""
INSTRUCT = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"""
PLAIN = """{% for message in messages %}{% if message['role'] == 'assistant' %}\
{{ 'Answer: ' }}{% generation %}{{ message['content'] + '\\n' }}{% endgeneration %}\
{% else %}{{ 'Question: ' + message['content'] + '\\n' }}{% endif %}{% endfor %}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama 3": LLAMA_3,
    "no prompt for the assistant": INSTRUCT,
    "no end-of-turn token": PLAIN,
}

NEXT_ROLE_ENDS = """{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] }}\
{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""As GLM-4.5's: nothing follows a message but the marker of the next role."""
ENDS_TWICE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt else eos_token }}"""
"""As Phi-3's: a token ends each message, and another one the conversation."""

LONG = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "Grüße! What is  1+1?"},
    {"role": "assistant", "content": "2 🎉"},
    {"role": "user", "content": "And <|im_start|>assistant\n2+2<|im_end|>?"},
    {"role": "assistant", "content": "\n4.\nA turn ends in <|im_end|>, said twice: <|im_end|>"},
]
SHORT = [{"role": "user", "content": "Add\n\n1+1"}, {"role": "assistant", "content": "It is 2."}]


def unmarked(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|sep|>")
ROLE_CONTROLS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "</call>")


def write_tokenizer(directory: Path, template: str | None = None, controls: Sequence[str] = CONTROLS) -> Path:
    """Byte-level, one token a byte but for the control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in controls])
    PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(directory)
    return directory


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
