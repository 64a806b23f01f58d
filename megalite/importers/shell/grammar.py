"""The syntax tree of a shell script, by tree-sitter's grammar of bash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from megalite.config.errors import ConfigError
from megalite.importers.shell.values import FIRST, LAST

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

_SPACES = re.compile(rb"(?:\s|\\\n)*")
_PRIVATE = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")


@lru_cache(maxsize=1)
def _parser() -> Parser:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise ConfigError(
            f"reading shell scripts requires tree-sitter ({error}). Install it with `pip install "
            "tree-sitter tree-sitter-bash`."
        ) from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """Parse a script. Invalid parts are nodes with `is_error`."""
    return _parser().parse(re.sub(r"\\\s*\Z", "", text).encode()).root_node


def without_private_characters(text: str) -> str:
    return _PRIVATE.sub("\ufffd", text)


def text_of(node: Node) -> str:
    """Return the text of a node without leading spaces and line continuations."""
    text = node.text or b""
    return text[_leading(text) :].decode()


def _leading(text: bytes) -> int:
    match = _SPACES.match(text)
    return match.end() if match else 0


def line_of(node: Node) -> int:
    return int(node.start_point.row) + 1


def parts(node: Node, opening: int = 0, closing: int = 0) -> Iterator[str | Node]:
    """Yield the expansions in a text and the literal text between them, without the first and last bytes.

    The literal text is what no expansion covers: the grammar has no node for some of it, and begins some
    expansions with spaces.
    """
    source, offset = node.text or b"", node.start_byte
    place, end = opening, len(source) - closing
    for child in node.named_children:
        if child.type in ("string_content", "heredoc_content", "comment"):
            continue
        start = child.start_byte - offset
        yield source[place : start + _leading(child.text or b"")].decode()
        yield child
        place = child.end_byte - offset
    yield source[place:end].decode()


def open_quote(error: Node, end: int) -> bool:
    """Return whether an invalid part is an unterminated quote.

    Args:
        end: length of the script.
    """
    if error.is_missing:
        return error.type in ('"', "'")
    return text_of(error)[:1] in ("'", '"') and error.end_byte >= end


def errors(node: Node) -> Iterator[Node]:
    """Yield the parts that are no bash."""
    if node.is_error or (node.is_missing and node.type not in ("word", "heredoc_end")):
        yield node
    elif node.has_error:
        for child in node.children:
            yield from errors(child)
