"""Which layers Megatron-LM's arguments select: by a number, a list of numbers, or letters of a hybrid."""

from __future__ import annotations

import ast
from typing import Any

from megalite.importers.verdict import ImportedFile

HYBRID_KEYS = ("hybrid-layer-pattern", "hybrid-override-pattern")  # the second one is older


def marked_layers(value: Any, layers: int) -> list[bool] | None:
    """Return whether each layer is marked, or None if the value is invalid.

    The value is N for every N-th layer from the first, or a list such as ([0]*3+[1]*58).
    """
    if type(value) is int and value > 0:
        return [layer % value == 0 for layer in range(layers)]
    try:
        parsed = _list(ast.parse(str(value), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return [bool(each) for each in parsed] if isinstance(parsed, list) and len(parsed) == layers else None


def _list(node: ast.expr) -> Any:
    """Return the value of an expression of lists and integers with + and *, of at most 10,000 elements."""
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.List():
            return [_list(each) for each in node.elts]
        case ast.BinOp(op=ast.Add()):
            left, right = _list(node.left), _list(node.right)
            if isinstance(left, list) and isinstance(right, list):
                return left + right
        case ast.BinOp(op=ast.Mult()):
            left, right = _list(node.left), _list(node.right)
            if isinstance(left, list) and isinstance(right, int) and len(left) * right <= 10_000:
                return left * right
    raise ValueError("another expression")


def hybrid_pattern(source: ImportedFile) -> str | None:
    """Return the pattern of a hybrid model; None: the model is a GPT."""
    return next((str(source.get(key)) for key in HYBRID_KEYS if source.get(key)), None)


def hybrid_layers(source: ImportedFile) -> str:
    """Return a letter for each layer of a hybrid model, without the bounds of stages and MTP modules."""
    return (hybrid_pattern(source) or "").partition("/")[0].replace("|", "")


def number_of_layers(source: ImportedFile) -> int | None:
    return len(hybrid_layers(source)) or source.size("num-layers")
