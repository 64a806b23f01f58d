"""The control flow of a script: && and ||, branches, and loops, some of whose conditions are not known."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megalite.importers.shell import grammar
from megalite.importers.shell.conditions import both, matches, negated
from megalite.importers.shell.values import ShellState, Status, has_unknown, joined

if TYPE_CHECKING:
    from tree_sitter import Node

    from megalite.importers.shell.script import Script

_C_STYLE_FOR = re.compile(r"for\s*\(\((.*?);(.*?);(.*?)\)\)\s*(?:;|\n|do|\{)", re.DOTALL)
MOST_ROUNDS = 1_000
"""Limit of the rounds of a loop."""


class ControlFlow:
    """Runs the branches and loops of a script. What differs between branches is not known after them."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def and_or(self, node: Node, state: ShellState) -> Status:
        """Return a && B, A || B."""
        first, second = node.named_children[0], node.named_children[-1]
        ends = [child for child in node.children if child.type in ("&&", "||")]
        status = self.script.run(first, state)
        return self.second(status, ends[-1].type if ends else "&&", second, first, state)

    def second(
        self, status: Status, sign: str, second: Node, first: Node | None, state: ShellState
    ) -> Status:
        """Run the command after && or || if the first's status requires it; return the status of both."""
        if state.ended or second is first or (status is not None and status is (sign == "||")):
            return status
        branch = state.fork()
        branch.failed = status is False
        second_status = self.script.run(second, branch)
        if status is None:
            state.replace(self._joined(state, [branch, state.fork()], second, first))
            if sign == "&&":
                return both(None, second_status)
            return negated(both(None, negated(second_status)))
        if branch.ended == "exit":  # where a prerequisite is missing: assume that it is there
            return status
        state.replace(branch)
        return second_status

    def _joined(
        self, before: ShellState, ends: list[ShellState], node: Node, condition: Node | None
    ) -> ShellState:
        """Return the state after branches.

        A variable that the condition tests, and that only one branch sets, has the value of that branch: it
        is a default.
        """
        why = f"under a condition in line {grammar.line_of(node)}"
        result = joined(before, ends, self.script.unknowns, why)
        text = grammar.text_of(condition) if condition is not None else ""
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text):
            values = [end.variables[name] for end in ends if name in end.variables]
            if name not in before.variables and len(values) == 1:
                result.variables[name] = values[0]
        return result

    def if_statement(self, node: Node, state: ShellState) -> Status:
        """Return the branches that may be taken, each from the state before it."""
        ends: list[ShellState] = []
        certain = False
        condition: Node | None = None
        for tests, body in _arms(node):
            status: Status = self.script.block(tests, state) if tests else True
            if status is False:
                continue
            condition = condition or (tests[0] if tests else None)
            own = state.fork()
            self.script.block(body, own)
            if status is True and not (own.ended == "exit" and tests):
                certain = True
                ends.append(own)
                break
            ends += [own] if own.ended != "exit" else []
        if not certain:
            ends.append(state.fork())
        state.replace(ends[0] if len(ends) == 1 else self._joined(state, ends, node, condition))
        return True if len(ends) == 1 else None

    def case_statement(self, node: Node, state: ShellState) -> Status:
        expander = self.script.expander(state)
        subject = node.child_by_field_name("value")
        text, ends, certain = expander.text(subject), [], False
        falls: ShellState | None = None
        for item in (child for child in node.named_children if child.type == "case_item"):
            values = item.children_by_field_name("value")
            status = True if falls else matches(text, [expander.token(value) for value in values])
            if status is False:
                continue
            own = falls or state.fork()
            self.script.block([child for child in item.named_children if child not in values], own)
            falls = own if own.ended == "" and item.children[-1].type == ";&" else None
            if falls or item.children[-1].type == ";;&":
                state.replace(own if status is True else self._joined(state, [own, state.fork()], node, None))
                continue
            if own.ended != "exit":
                ends.append(own)
            if status is True:
                certain = True
                break
        if not certain or not ends:
            ends.append(state.fork())
        state.replace(ends[0] if len(ends) == 1 else self._joined(state, ends, node, None))
        return None

    def for_statement(self, node: Node, state: ShellState) -> Status:
        expander = self.script.expander(state)
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = node.children_by_field_name("value")
        words = expander.words(values) if values else (state.arguments or [])
        name = grammar.text_of(variable) if variable is not None else ""
        is_for = node.children[0].type == "for"  # not select
        known = is_for and len(words) <= MOST_ROUNDS and not any(map(has_unknown, words))
        if known and (values or state.arguments is not None):
            for word in words:
                state.assign(name, word)
                if body is not None and self._round(body, state):
                    break
            return True
        source = self.script.unknowns.show(" ".join(words)) or "$@"
        self._perhaps(body, state, node, name, f"a loop variable over {source}")
        return None

    def _round(self, body: Node, state: ShellState) -> bool:
        """Run a round of a loop; return whether it is the last."""
        self.script.run(body, state)
        last = state.ended not in ("", "continue")
        kind, _, levels = state.ended.partition(" ")
        if kind in ("break", "continue"):
            outer = int(levels or 1) - 1
            state.ended = f"{kind} {outer}" if outer > 1 else kind if outer else ""
        return last

    def _perhaps(
        self, body: Node | None, state: ShellState, node: Node, name: str = "", why: str = ""
    ) -> None:
        """Run a loop with an unknown number of rounds once."""
        own = state.fork()
        if name:
            own.assign(name, self.script.unknowns.mark(f"${name}", why))
        if body is not None:
            self._round(body, own)
        where = f"in a loop in line {grammar.line_of(node)}"
        state.replace(joined(state, [own, state.fork()], self.script.unknowns, where))

    def c_style_for_statement(self, node: Node, state: ShellState) -> Status:
        header = _C_STYLE_FOR.match(grammar.text_of(node))
        body = node.child_by_field_name("body")
        if header is None or body is None:
            return None
        start, test, step = header.groups()
        self.script.truth(start, state)
        for _ in range(MOST_ROUNDS):
            status = self.script.truth(test or "1", state)
            if status is None:
                self._perhaps(body, state, node)
                return None
            if not status or self._round(body, state):
                return True
            self.script.truth(step, state)
        return None

    def while_statement(self, node: Node, state: ShellState) -> Status:
        tests = [child for child in node.children_by_field_name("condition") if child.is_named]
        body = node.child_by_field_name("body")
        test_text = " ".join(map(grammar.text_of, tests))
        body_text = grammar.text_of(body) if body is not None else ""
        if state.arguments is None and _reads_arguments(test_text, body_text):
            return True  # the script's own arguments: assume that it has none
        for _ in range(MOST_ROUNDS):
            status = self.script.block(tests, state)
            if node.children[0].type == "until":
                status = negated(status)
            if status is False or body is None:
                return True
            if status is None:
                self._perhaps(body, state, node)
                return None
            if self._round(body, state):
                return True
        return None


def _reads_arguments(condition: str, body: str) -> bool:
    """Return whether a loop goes over positional parameters."""
    over = re.search(r"\$\{?[#1@*]|\bgetopts\b|^\s*(:|true)\s*$", condition)
    return bool(over and re.search(r"\bshift\b|\bgetopts\b", condition + body))


def _arms(node: Node) -> list[tuple[list[Node], list[Node]]]:
    """Return the conditions and bodies of an if, its elifs and its else."""
    arms: list[tuple[list[Node], list[Node]]] = []
    tests: list[Node] = []
    body: list[Node] = []
    inside = False
    for child in node.children:
        if child.type == "then":
            inside = True
        elif child.type in ("elif_clause", "else_clause"):
            if child.type == "elif_clause":
                arms += _arms(child)
            else:
                arms.append(([], child.named_children))
        elif child.is_named:
            (body if inside else tests).append(child)
    return [(tests, body), *arms]
