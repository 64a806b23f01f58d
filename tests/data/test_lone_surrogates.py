"""Lone surrogates in JSON are replaced wherever they are, and nothing else is changed."""

from __future__ import annotations

import json

import pytest

from megalite.data.lone_surrogates import parsed, whole

VALUES = {
    r'"\ud800"': "\ufffd",
    r'"a\uDFFFb"': "a\ufffdb",
    r'"\udc00\ud800"': "\ufffd\ufffd",
    r'"\ud83c\udf89 \uD83C\uDF89"': "🎉 🎉",
    r'{"messages": [{"content": "\ud800", "n": [1, null, {"\udcff": true}]}]}': {
        "messages": [{"content": "\ufffd", "n": [1, None, {"\ufffd": True}]}]
    },
}


@pytest.mark.parametrize("text", VALUES)
def test_lone_surrogates_are_replaced_at_any_depth(text):
    value, replaced = parsed(text)
    assert value == VALUES[text] and replaced == (json.loads(text) != VALUES[text])
    json.dumps(value, ensure_ascii=False).encode()


def test_other_text_is_as_it_was():
    assert whole("grüße \\ud800 🎉") == ("grüße \\ud800 🎉", False)
    assert parsed(r'"a backslash: \\ud800"') == (r"a backslash: \ud800", False)
    assert whole("\udc80") == ("\ufffd", True)
