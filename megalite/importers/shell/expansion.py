"""Expansion of the words of a script as in bash: variables, quotes, arithmetic and word splitting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from megalite.importers.shell import arithmetic, globs, grammar
from megalite.importers.shell.arrays import IndexedArray
from megalite.importers.shell.conditions import Token
from megalite.importers.shell.values import ShellState, Unknowns, Value, as_array, checked, has_unknown

if TYPE_CHECKING:
    from tree_sitter import Node

UNSET = "not set in the script"
_PARAMETER = re.compile(
    r"(?P<indirect>!?)(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>(?:[^\[\]]|\[[^\[\]]*\])*)\])?(?P<rest>.*)",
    re.DOTALL,
)
_OPERATOR = re.compile(r"(?P<sign>:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:|@)(?P<word>.*)", re.DOTALL)
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\[[@*]\])?")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "e": "\x1b",
    "E": "\x1b",
}
_BRACES = re.compile(
    r"([^{}]*)\{([^{},$]*(?:,[^{},$]*)+|-?\d+\.\.-?\d+(?:\.\.-?\d+)?|[A-Za-z]\.\.[A-Za-z])\}(.*)", re.DOTALL
)
_REPLACEMENT = re.compile(
    r"(?P<anchor>[#%]?)(?P<old>(?:\\.|\"[^\"]*\"|'[^']*'|[^/\\])*)(?:/(?P<new>.*))?", re.DOTALL
)
_ELEMENTS = re.compile(r"\$@|\$\{(@|!?\w+\[@\])")
"""What is no word at all, even in quotes, if it has no elements."""
_DELIMITER = "END_OF_A_TEXT"


class WordPiece(NamedTuple):
    """A part of a word: literal, expanded, or the break between two elements of an array.

    Expanded text is split at spaces unless it is quoted.
    """

    text: str
    kind: Literal["literal", "quoted", "split", "break"]


class Alternative(tuple[WordPiece, ...]):
    """The text after :- and its kind, which can have quotes of its own."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self)


Expanded = str | list[str] | Alternative


class Expander:
    """The expansion of words in one state.

    Args:
        output: the output of the commands in $(…).
    """

    def __init__(
        self, state: ShellState, unknowns: Unknowns, output: Callable[[Node, ShellState], str]
    ) -> None:
        self.state, self.unknowns, self.output = state, unknowns, output

    def words(self, nodes: Iterable[Node]) -> list[str]:
        return [word for node in nodes for word in self.fields(node)]

    def fields(self, node: Node) -> list[str]:
        """Return the words that one word of the script becomes."""
        if _BRACES.match(grammar.text_of(node)) and node.type in (
            "word",
            "concatenation",
            "brace_expression",
        ):
            alternatives = [*braces(grammar.text_of(node))]
            if alternatives != [grammar.text_of(node)]:
                first = grammar.parse("echo " + " ".join(alternatives)).named_children[0]
                return [
                    word
                    for child in first.named_children[1:]
                    for word in self._split(self.pieces(child, False))
                ]
        return self._split(self.pieces(node, False))

    def text(self, node: Node | None) -> str:
        """Expand a word without splitting it, such as the value of an assignment."""
        if node is None:
            return ""
        return _whole(self.pieces(node, False))

    def token(self, node: Node) -> Token:
        """Expand a word of a condition, and return it with its possible patterns.

        Quoted characters stand for themselves in a pattern.
        """
        pieces = [*self.pieces(node, False)]
        # the grammar does not say which part of it is quoted
        if node.type == "regex" and re.search("[\"']", grammar.text_of(node)):
            return Token(_whole(pieces), False, _pattern(pieces), None)
        regular = "".join(
            re.escape(piece.text) if piece.kind == "quoted" else globs.with_classes(piece.text)
            for piece in pieces
        )
        return Token(_whole(pieces), node.type in ("string", "raw_string"), _pattern(pieces), regular)

    def string(self, text: str) -> str:
        """Expand a text as in double quotes or in a here document: only variables are replaced."""
        if not re.search(r"[$`\\]", text):
            return text
        # the grammar misses a variable that only spaces precede
        tree = grammar.parse(f"cat <<{_DELIMITER}\n|{text}\n{_DELIMITER}\n")
        body = next((node for node in _walk(tree) if node.type == "heredoc_body"), None)
        if body is None:
            return text
        match = "".join(
            self._unescaped(part, '"') if isinstance(part, str) else self._joined(part)
            for part in grammar.parts(body)
        )
        return checked(match.removesuffix("\n")[1:])

    def _joined(self, node: Node) -> str:
        return "".join(" " if piece.kind == "break" else piece.text for piece in self.pieces(node, True))

    def _unescaped(self, text: str, kept: str = "") -> str:
        """Remove the backslashes that double quotes remove, except before characters in `kept`."""
        return re.sub(
            r"\\([$`\"\\\n])",
            lambda match: "" if match[1] == "\n" else match[0] if match[1] in kept else match[1],
            text,
        )

    def _split(self, pieces: Iterable[WordPiece]) -> list[str]:
        """Split words at spaces."""
        separators = self.state.separators
        pattern = f"[{re.escape(separators)}]+" if separators else r"(?!)"
        words: list[str] = []
        word: str | None = None
        for text, kind in pieces:
            if kind == "break":
                words, word = ([*words, word] if word is not None else words), None
            elif kind == "split":
                first, *rest = re.split(pattern, text)
                if first:
                    word = (word or "") + first
                for part in rest:
                    words, word = ([*words, word] if word is not None else words), part or None
            elif text or kind == "quoted":
                word = (word or "") + text
        return [*words, word] if word is not None else words

    def pieces(self, node: Node, quoted: bool) -> Iterator[WordPiece]:
        """Yield the parts of a word.

        Args:
            quoted: whether it is inside of double quotes.
        """
        text = grammar.text_of(node)
        match node.type:
            case "string" | "translated_string":
                yield from self._string(node)
            case "raw_string":
                yield WordPiece(text[1:-1], "quoted")
            case "ansi_c_string":
                yield WordPiece(
                    re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text[2:-1]), "quoted"
                )
            case "simple_expansion" | "expansion":
                yield from self._parameter(text[2:-1] if text.startswith("${") else text[1:], text, quoted)
            case "arithmetic_expansion":
                yield WordPiece(
                    self.arithmetic(re.sub(r"^\$(\(\(|\[)|(\)\)|\])$", "", text), text),
                    "quoted" if quoted else "split",
                )
            case "command_substitution":
                yield WordPiece(self.output(node, self.state).rstrip("\n"), "quoted" if quoted else "split")
            case "process_substitution":
                yield WordPiece(self.unknowns.mark(text, "the output of a command"), "literal")
            case "concatenation" | "command_name" | "array":
                for child in node.children:
                    yield from self.pieces(child, quoted)
            case _:
                yield from [WordPiece(text, "literal")] if quoted else _unquoted(text)

    def _string(self, node: Node) -> Iterator[WordPiece]:
        inner = [*node.children]
        opening = len(inner[0].text or b"") if inner else 1
        if (
            len(inner) == 3
            and _ELEMENTS.match(grammar.text_of(inner[1]).strip())
            and inner[1].type.endswith("expansion")
        ):
            yield from self.pieces(inner[1], True)
            return
        yield WordPiece("", "quoted")
        for part in grammar.parts(node, opening, 1):
            if isinstance(part, str):
                yield WordPiece(self._unescaped(part), "quoted")
            else:
                yield from self.pieces(part, True)

    def arithmetic(self, inner: str, source: str) -> str:
        """Return the value of $((inner)), or an unknown part that is shown as `source`."""
        expression = (
            re.sub(r"\$(\w+)", r"\1", inner) if re.fullmatch(r"[^`{(]*", inner.replace("$((", "")) else inner
        )
        expression = self.string(expression)
        blocked: list[str] = []

        def read(name: str) -> str | None:
            variable, _, index = name.partition("[")
            value = self._looked_up(variable, index.rstrip("]") or None)
            value = "" if value == [] else value
            if not isinstance(value, str) or has_unknown(value):
                blocked.append(name)
                return None
            return value

        try:
            return str(arithmetic.calculate(expression, read, self.state.assign))
        except arithmetic.NotKnown:
            parts = self.unknowns.within(expression)
            for value in map(self.state.variables.get, blocked):
                parts += self.unknowns.within(value) if isinstance(value, str) else ()
            names = [
                *dict.fromkeys(
                    [part.source for part in parts]
                    + [f"${name}" for name in blocked if name not in self.state.variables]
                )
            ]
            why = (
                f"{', '.join(names)}: {parts[0].why if parts else UNSET}"
                if names
                else "not an integer expression"
            )
            return self.unknowns.mark(source, why)

    def _parameter(self, inner: str, source: str, quoted: bool) -> Iterator[WordPiece]:
        """Yield the pieces of ${inner}: those of an array are separate words."""
        kind: Literal["quoted", "split"] = "quoted" if quoted else "split"
        parameter = _PARAMETER.fullmatch(inner)
        if parameter is None:
            yield WordPiece(self.unknowns.mark(source, UNSET), kind)
            return
        name, index = parameter["name"], parameter["index"]
        value = self._operated(parameter, source)
        if isinstance(value, Alternative):
            yield from [WordPiece(piece.text, "quoted") for piece in value] if quoted else value
        elif isinstance(value, str):
            yield WordPiece(value, kind)
        elif quoted and "*" in (name, index):
            yield WordPiece(self.state.separators[:1].join(value), kind)
        else:
            all_elements = index in ("@", "*") or (name in "@*" and index is None)
            for place, element in enumerate(value if all_elements else value[:1]):
                if place:
                    yield WordPiece("", "break")
                yield WordPiece(element, kind)

    def _operated(self, parameter: re.Match[str], source: str) -> Expanded:
        """Return the value of a parameter after its operator."""
        name, index = parameter["name"], parameter["index"]
        if parameter["indirect"] and index in ("@", "*"):
            keys = self.state.keys(name)
            return self._unknown(name, source) if keys is None else keys
        value = self._looked_up(name, index)
        if parameter["indirect"]:
            if not isinstance(value, str) or has_unknown(value) or not _REFERENCE.fullmatch(value):
                return self.unknowns.mark(source, UNSET)
            target, _, index = value.partition("[")
            value = self._looked_up(target, index[:-1] or None)
        if parameter["length"]:
            texts = [value] if isinstance(value, str) else value
            known = texts is not None and not any(map(has_unknown, texts))
            return str(len(value or "")) if known else self.unknowns.mark(source, UNSET)
        return self._with_operator(value, parameter, source)

    def _with_operator(
        self, value: str | list[str] | None, parameter: re.Match[str], source: str
    ) -> Expanded:
        name, operator = parameter["name"], _OPERATOR.fullmatch(parameter["rest"])
        if operator is None:
            return self._unknown(name, source) if value is None else value
        sign, word = operator["sign"], operator["word"]
        if sign[-1] in "-=+?":
            return self._alternative_or(value, sign, word, name, source)
        if value is None:
            return self._unknown(name, source)
        if isinstance(value, str):
            return self._edited(value, sign, word, source)
        if sign != ":":
            return [self._edited(element, sign, word, source) for element in value]
        if name in "@*":
            return self._parameters(value, word, source)
        array = self.state.variables.get(self.state.named(name))
        if parameter["indirect"] or not isinstance(array, IndexedArray):
            array = IndexedArray.of(value)
        return self._slice(array, word, source)

    def _alternative_or(
        self, value: str | list[str] | None, sign: str, word: str, name: str, source: str
    ) -> Expanded:
        """Expand ${NAME-WORD}, ${NAME=WORD}, ${NAME+WORD} or ${NAME?WORD}.

        With :, an empty value counts as unset.
        """
        empty = not value if sign[0] == ":" else value in (None, [])
        if sign[-1] == "+":
            return "" if empty else self.alternative(word)
        if not empty and value is not None:
            return value
        if sign[-1] == "?":
            return self._unknown(name, source)
        default = self.alternative(word)
        if sign[-1] == "=":
            self.state.assign(name, default.text)
        return default

    def _unknown(self, name: str, source: str) -> str:
        """Return the unknown part for an unset parameter."""
        return self.unknowns.mark(source, self.why_unset(name))

    def alternative(self, word: str) -> Alternative:
        """Expand the text after :- and return it with its kind.

        It is split at spaces outside of quotes.
        """
        if not re.search(r"[\"'\\]", word):
            return Alternative([WordPiece(self.string(word), "split")])
        tree = grammar.parse(f"echo {word}")
        command = tree.named_children[0] if tree.named_children else tree
        pieces: list[WordPiece] = []
        for child in command.named_children[1:] if command.type == "command" else ():
            pieces += [WordPiece(" ", "split")] if pieces else []
            pieces += self.pieces(child, False)
        return Alternative(pieces)

    def _parameters(self, value: list[str], word: str, source: str) -> str | list[str]:
        """Expand ${@:FIRST:COUNT}. The parameters begin with $1, after $0."""
        if self.state.arguments is None:
            return self._unknown("@", source)
        start = self.arithmetic(word.partition(":")[0], source)
        parameters = value if start.startswith("-") else [self.state.program, *value]
        return self._slice(IndexedArray.of(parameters), word, source)

    def _slice(self, array: IndexedArray, word: str, source: str) -> str | list[str]:
        """Return FIRST:COUNT of an array or of the characters of a text."""
        start, _, length = word.partition(":")
        first, count = (self.arithmetic(part, source) for part in (start, length or "0"))
        if has_unknown(first) or has_unknown(count):
            return self.unknowns.mark(source, UNSET)
        return array.slice(int(first), int(count) if length else None)

    def _edited(self, value: str, sign: str, word: str, source: str) -> str:
        """Return a value with a part removed, replaced or in another case."""
        if has_unknown(value):
            names = self.unknowns.within(value)
            return self.unknowns.mark(source, f"{names[0].source}: {names[0].why}")
        if sign in ("^", "^^", ",", ",,"):
            change = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
        if sign == "@":
            cased = {"U": str.upper, "L": str.lower}.get(word)
            return self.unknowns.mark(source, "quoted text") if cased is None else cased(value)
        if sign == ":":
            return "".join(self._slice(IndexedArray.of(value), word, source))
        if sign in ("#", "##", "%", "%%"):
            return trimmed(value, sign, _pattern(self.alternative(word)))
        return self._replaced(value, sign, word) if sign in ("/", "//") else value

    def _replaced(self, value: str, sign: str, word: str) -> str:
        """Expand ${NAME/OLD/NEW}.

        // replaces all matches, /# and /% a match at the start or the end of the value.
        """
        replacement = _REPLACEMENT.fullmatch(word)
        if replacement is None or not (replacement["anchor"] or replacement["old"]):
            return value
        anchor = replacement["anchor"] if sign == "/" else ""
        old, new = (
            _pattern(self.alternative(word[len(anchor) : replacement.end("old")])),
            self.alternative(replacement["new"] or "").text,
        )
        if anchor:
            longest = trimmed(value, anchor * 2, old)
            unchanged = longest == value and globs.regular(old).fullmatch("") is None
            return value if unchanged else f"{new}{longest}" if anchor == "#" else f"{longest}{new}"
        return globs.regular(old).sub(lambda _: new, value, count=0 if sign == "//" else 1)

    def why_unset(self, name: str) -> str:
        if name.isdigit() or name in "@*#":
            return "an argument of the script"
        if name in self.state.withheld:
            return "set in the script without export, so the command does not see it"
        return UNSET

    def _looked_up(self, name: str, index: str | None) -> str | list[str] | None:
        """Return the value of a variable or parameter, or None if it is not set.

        All elements of an array are returned as a list.
        """
        arguments = self.state.arguments
        if name in ("@", "*"):
            return arguments if arguments is not None else [self._unknown(name, f"${name}")]
        if name == "#":
            return None if arguments is None else str(len(arguments))
        if name == "0":
            return self.state.program or None
        if name.isdigit():
            return (
                None if arguments is None else arguments[int(name) - 1] if int(name) <= len(arguments) else ""
            )
        if name == "?":
            return (
                self.unknowns.mark("$?", "the exit status of a failed command") if self.state.failed else "0"
            )
        value = self.state.variables.get(self.state.named(name))
        if value is None and name == "BASH_SOURCE":
            return self.state.program or None
        return self._element(value, index)

    def _element(self, value: Value | None, index: str | None) -> str | list[str] | None:
        """Return an element of a variable: an empty list if it is unset, or None if it is unknown."""
        if value is None:
            return None
        if isinstance(value, dict):
            if index in ("@", "*"):
                return [*value.values()]
            return value.get(self._unescaped(self.string((index or "0").strip("\"'"))))
        array = as_array(value)
        if index in ("@", "*"):
            return array.elements
        place = self.arithmetic(index or "0", index or "0")
        if has_unknown(place):
            return None
        element = array.get(int(place))
        return [] if element is None else element


def braces(text: str) -> Iterator[str]:
    """Yield the words of a{1..3} or a{b,c}; the text itself if it has quotes or no such braces."""
    match = _BRACES.fullmatch(text)
    if match is None or re.search(r"[\"'`\\]", text) or match[1].endswith("$"):
        yield text
        return
    for each in match[2].split(",") if "," in match[2] else _counted(*match[2].split("..")):
        yield from braces(f"{match[1]}{each}{match[3]}")


def _unquoted(text: str) -> Iterator[WordPiece]:
    """Yield a text outside of quotes, in which a backslash quotes a character."""
    for place, part in enumerate(re.split(r"\\(\n|.)", text)):
        if part not in ("", "\n"):
            yield WordPiece(part, "quoted" if place % 2 else "literal")


def _counted(first: str, last: str, step: str = "1") -> list[str]:
    """Return the words of {1..9..2}, {01..10} or {a..c}."""
    letters = first.isalpha()
    start, end = (ord(first), ord(last)) if letters else (int(first), int(last))
    stride = (abs(int(step)) or 1) * (1 if end >= start else -1)
    numbers = range(start, end + (1 if stride > 0 else -1), stride)[:10_000]
    width = max(map(len, (first, last))) if re.match("-?0[0-9]", first) or re.match("-?0[0-9]", last) else 0
    return [chr(number) if letters else f"{number:0{width}d}" for number in numbers]


def _whole(pieces: Iterable[WordPiece]) -> str:
    return checked("".join(" " if piece.kind == "break" else piece.text for piece in pieces))


def _pattern(pieces: Iterable[WordPiece]) -> str:
    return "".join(globs.quoted(piece.text) if piece.kind == "quoted" else piece.text for piece in pieces)


def trimmed(value: str, sign: str, pattern: str) -> str:
    """Remove the shortest (#, %) or longest (##, %%) match of the pattern at the start or end of a value."""
    lengths = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    matcher = globs.regular(pattern)
    for length in lengths:
        part = value[:length] if sign[0] == "#" else value[len(value) - length :]
        if matcher.fullmatch(part):
            return value[length:] if sign[0] == "#" else value[: len(value) - length]
    return value


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)
