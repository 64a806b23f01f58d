"""Assignments to the variables of a script: NAME=VALUE, declare and its like, unset."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megalite.importers.shell import grammar
from megalite.importers.shell.arrays import IndexedArray
from megalite.importers.shell.expansion import Expander
from megalite.importers.shell.values import ShellState, Value, as_array

if TYPE_CHECKING:
    from tree_sitter import Node

    from megalite.importers.shell.script import Script

_KEYED = re.compile(r"\[[^\]]*\]=")
_ELEMENT = re.compile(r"([A-Za-z_]\w*)\[(.*)\]", re.DOTALL)


class Assignments:
    """The commands of a script that change its variables."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def assign(self, node: Node, state: ShellState, *, associative: bool = False, local: bool = False) -> str:
        """Run an assignment and return the name.

        Args:
            local: declare the variable local to the running function.
        """
        expander = self.script.expander(state)
        target, content = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert target is not None
        name_node = target.child_by_field_name("name") if target.type == "subscript" else target
        name = state.named(grammar.text_of(name_node) if name_node is not None else "")
        is_new = local and state.would_hide(name)
        before = IndexedArray() if is_new else state.variables.get(name, IndexedArray())
        appends = any(child.type == "+=" for child in node.children) and not is_new
        value: Value
        if content is None or content.type != "array":
            value = expander.text(content)
        elif associative or isinstance(before, dict):
            value = _associative(content, expander)
        else:
            first = as_array(before).end if appends else 0
            value = _indexed(content, expander, first)
        if name in state.integers and isinstance(value, str):
            value, appends = expander.arithmetic(f"{name}+({value})" if appends else value, value), False
        if local:  # after the expansion of the value, which may read the variable that the new one hides
            state.declare_local(name)
        if target.type == "subscript":
            index = expander.text(target.child_by_field_name("index"))
            self._assign_element(name, index, value if isinstance(value, str) else "", state, appends)
        elif appends:
            state.append(name, value)
        else:
            state.assign(name, value)
        return name

    def _assign_element(self, name: str, index: str, value: str, state: ShellState, appends: bool) -> None:
        """Run NAME[index]=value or NAME[index]+=value."""
        before = state.variables.get(name, IndexedArray())
        if isinstance(before, dict):
            state.assign(name, before | {index: (before.get(index, "") if appends else "") + value})
            return
        array = as_array(before)
        number = self.script.expander(state).arithmetic(index, index)
        place = array.place(int(number)) if re.fullmatch(r"-?\d+", number) else -1
        if place < 0:
            value = self.script.unknowns.mark(f"${name}", "the index of an element is unknown")
            place = array.end
        elif appends:
            value = (array.get(place) or "") + value
        state.assign(name, array.with_elements({place: value}))

    def declare(self, node: Node, state: ShellState) -> bool:
        """export, declare, local, readonly and typeset."""
        expander = self.script.expander(state)
        words = [grammar.text_of(child) for child in node.named_children]
        flags = "".join(word[1:] for word in words if word.startswith("-"))
        keyword = node.children[0].type
        exports = keyword == "export" or "x" in flags
        # -g declares a global variable; -p, -f and -F only print
        local = keyword in ("local", "declare", "typeset") and not {*"gpfF"} & {*flags}
        for child in node.named_children:
            if child.type == "variable_assignment":
                name = grammar.text_of(child).partition("=")[0]
                if "n" in flags:
                    state.references[name] = expander.text(child.child_by_field_name("value"))
                    continue
                if "i" in flags:
                    state.integers |= {name}
                name = self.assign(child, state, associative="A" in flags, local=local)
            elif grammar.text_of(child).startswith("-") or child.type == "comment":
                continue
            else:
                name = _declare_name(expander.text(child), flags, local, exports, state)
            if exports and name:
                state.exported.add(name)
        return True

    def unset_command(self, node: Node, state: ShellState) -> bool:
        words, end = [""], 0
        for child in node.named_children:
            if child.start_byte > end:  # NAME[INDEX] is one word of two nodes
                words.append("")
            words[-1] += self.script.expander(state).text(child)
            end = child.end_byte
        return self.unset([word for word in words if word], state)

    def unset(self, words: list[str], state: ShellState) -> bool:
        """Run unset NAME or NAME[INDEX], which unsets functions with -f."""
        for word in words:
            element = _ELEMENT.fullmatch(word)
            if word.startswith("-"):
                continue
            if "-f" in words:
                self.script.functions.pop(word, None)
            elif element is None:
                state.unset(word)
            else:
                self._unset_element(state.named(element[1]), element[2], state)
        return True

    def _unset_element(self, name: str, index: str, state: ShellState) -> None:
        value = state.variables.get(name)
        if isinstance(value, dict):
            value.pop(index.strip("'\""), None)
        elif index in ("@", "*"):
            state.unset(name)
        elif value is not None:
            number = self.script.expander(state).arithmetic(index, index)
            if re.fullmatch(r"-?\d+", number):
                state.variables[name] = as_array(value).without(int(number))

    def restore(self, state: ShellState, before: ShellState, names: list[str]) -> None:
        """Undo the assignments that precede one command."""
        for name in names:
            state.exported -= {name} - before.exported
            if name in before.variables:
                state.variables[name] = before.variables[name]
            else:
                state.variables.pop(name, None)


def _elements(node: Node) -> list[Node]:
    return [child for child in node.named_children if child.type != "comment"]


def _associative(node: Node, expander: Expander) -> dict[str, str]:
    pairs = [
        expander.text(child).partition("]=")
        for child in _elements(node)
        if _KEYED.match(grammar.text_of(child))
    ]
    return {key[1:]: value for key, _, value in pairs}


def _indexed(node: Node, expander: Expander, first: int) -> IndexedArray:
    """Index the elements of (a [3]=b c), where an element without an index follows the previous one.

    Args:
        first: index of the first element.
    """
    elements: dict[int, str] = {}
    place = first
    for child in _elements(node):
        if _KEYED.match(grammar.text_of(child)):
            index, _, value = expander.text(child).partition("]=")
            number = expander.arithmetic(index[1:], index[1:])
            place = int(number) if re.fullmatch(r"\d+", number) else place
            words = [value]
        else:
            words = expander.words([child])
        elements.update(enumerate(words, place))
        place += len(words)
    return IndexedArray(dict(sorted(elements.items())))


def _declare_name(text: str, flags: str, local: bool, exports: bool, state: ShellState) -> str:
    """Declare a name without a value, or a word that expands to NAME=VALUE, and return the name."""
    name, equals, value = text.partition("=")
    if "n" in flags:
        state.references[name] = value
        return ""
    state.integers |= {name} if "i" in flags else set()
    if local:
        state.declare_local(name)
    if equals:
        state.assign(name, value)
    elif name not in state.variables and not exports:
        state.assign(name, {} if "A" in flags else IndexedArray())
    return name
