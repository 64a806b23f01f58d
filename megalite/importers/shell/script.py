"""The commands that a shell script starts, with the words they get. Nothing is executed, and this process's
environment is not read.

A script is followed as bash would run it, over values of which some are not known: variables from outside,
outputs of programs, and what is set differently in branches whose condition is not known. Such parts keep
their text and have a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from megalite.config.schema import ConfigError
from megalite.importers.shell import grammar
from megalite.importers.shell.commands import Commands
from megalite.importers.shell.conditions import Condition, Token, both, matches, negated
from megalite.importers.shell.expansion import Expander
from megalite.importers.shell.values import ShellState, Unknowns, Value, Word, has_unknown, joined

if TYPE_CHECKING:
    from tree_sitter import Node

Status = bool | None
"""Whether a command succeeds; None if it is not known."""
_PLACEHOLDER = re.compile(r"<([A-Za-z](?:[^<>\n\"'$|;&=]*[\w.)\]])?)>(?=[\s\"'/\\_.-]|$)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
MOST_STEPS, MOST_ROUNDS, DEEPEST = 20_000, 1_000, 40
"""Limits of commands, of rounds of a loop, and of scripts and functions within each other."""


class ScriptCommand(NamedTuple):
    """A command of a script: its words, and where it begins."""

    words: list[Word]
    line: int


class Found(NamedTuple):
    """What a script runs: the commands that a caller asks for, texts that were not understood or not read, by
    kind, and the words in the variables at its end."""

    runs: list[ScriptCommand]
    unread: dict[str, list[str]]
    variables: dict[str, list[Word]]


def commands(
    text: str,
    wanted: Callable[[list[str]], bool],
    read: Callable[[str], str | None] = lambda path: None,
    name: str = "",
) -> Found:
    """The commands of a script that are `wanted`, in the order in which they would be started.

    wanted: whether the words of a command are those of one; read: the text of another script that this one
    names, None if there is none; name: the script's own path.
    Raises ConfigError for a script that does not end, or is nested without end.
    """
    script = Script(wanted, read)
    state = ShellState(program=name)
    try:
        script.run_text(text, state)
    except RecursionError:
        raise ConfigError(
            "the script can not be read: it is nested too deeply. Give the command alone."
        ) from None
    values = {key: [value] if isinstance(value, str) else [*value] for key, value in state.variables.items()}
    words = {
        key: [script.unknowns.word(word) for text in texts for word in text.split()]
        for key, texts in values.items()
    }
    return Found(script.runs, script.unread, words)


class Script:
    """The walk over the syntax tree of a script and of those that it starts."""

    def __init__(self, wanted: Callable[[list[str]], bool], read: Callable[[str], str | None]) -> None:
        self.wanted, self.read = wanted, read
        self.unknowns = Unknowns()
        self.runs: list[ScriptCommand] = []
        self.unread: dict[str, list[str]] = {}
        self.functions: dict[str, Node] = {}
        self.files: dict[str, str] = {}
        self.sink: list[str] | None = None
        self.stdin: str | None = None
        self.steps = self.depth = self.line = 0
        self.commands = Commands(self)

    def run_text(self, text: str, state: ShellState) -> Status:
        """Run a script or the text of a command."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise RecursionError
        text = self._placeholders(
            text if self.depth > 1 else grammar.without_private_characters(text)
        ).replace("\r\n", "\n")
        for name, value in _directives(text):
            if name not in state.variables:
                state.assign(name, value)
                state.exported.add(name)
        tree = grammar.parse(text)
        for error in grammar.errors(tree):
            if grammar.open_quote(error, len(text.rstrip().encode())):
                where = grammar.line_of(error) if self.depth == 1 else self.line
                raise ConfigError(
                    f"the script can not be read: a quotation in line {where} has no end. Correct its quotes."
                )
            self.note("line", f"{grammar.line_of(error)}: {' '.join(grammar.text_of(error).split())[:60]}")
        status = self.block(tree.named_children, state)
        self.depth -= 1
        return status

    def _placeholders(self, text: str) -> str:
        """A text in which <what is to be filled in> is an unknown part, not a redirection."""
        return _PLACEHOLDER.sub(lambda found: self.unknowns.mark(found[0], "it is a placeholder"), text)

    def note(self, kind: str, text: str) -> None:
        """Record a text that was not read, once."""
        text = self.unknowns.show(text)
        if text not in self.unread.setdefault(kind, []):
            self.unread[kind].append(text)

    def record(self, words: list[str]) -> None:
        """Record a wanted command. Its output is not known."""
        self.runs.append(ScriptCommand([self.unknowns.word(word) for word in words], self.line))
        self.write("\0")

    def expander(self, state: ShellState) -> Expander:
        return Expander(state, self.unknowns, self.substituted)

    def write(self, text: str) -> None:
        if self.sink is not None:
            self.sink.append(text)

    def captured(self, run: Callable[[], Status]) -> tuple[str, Status]:
        """The output of what `run` runs, and its status."""
        outer, self.sink = self.sink, []
        status = run()
        text, self.sink = "".join(self.sink), outer
        return text, status

    def substituted(self, node: Node, state: ShellState) -> str:
        """The output of $(…), in which an unknown output is shown as the whole substitution."""
        source = grammar.text_of(node)
        if source.startswith("`"):
            inner = re.sub(r"\\([`$\\])", r"\1", source[1:-1])
            text, _ = self.captured(lambda: self.run_text(inner, state.fork()))
        else:
            text, _ = self.captured(lambda: self._shown(node, state.fork()))
        return re.sub("\0+", lambda _: self.unknowns.mark(source, "it is the output of a command"), text)

    def _shown(self, node: Node, state: ShellState) -> Status:
        """The commands in $(…), or the file of $(< FILE)."""
        files = [
            child for child in node.named_children if child.type == "file_redirect" and _sign(child) == "<"
        ]
        if not files or len(node.named_children) > 1:
            return self.block(node.named_children, state)
        text = self.content(self.expander(state).text(files[0].child_by_field_name("destination")))
        self.write("\0" if text is None else text)
        return None if text is None else True

    def content(self, path: str) -> str | None:
        """The text of a file that the script has written, or that is beside it; None if it can not be
        read."""
        if path in self.files:
            return self.files[path]
        return None if has_unknown(path) else self.read(path)

    def block(self, nodes: Iterable[Node], state: ShellState) -> Status:
        """Run commands one after the other; the status is that of the last."""
        status: Status = True
        comment = False
        for node in nodes:
            if state.ended:
                break
            if node.type == "comment":
                comment = True
                continue
            if (
                comment
                and self.runs
                and node.type in ("command", "redirected_statement")
                and grammar.text_of(node).lstrip().startswith("--")
            ):
                self.note("cut", " ".join(grammar.text_of(node).split())[:80])
                continue
            comment = False
            status = self.run(node, state)
            state.failed = status is False
        return status

    def run(self, node: Node, state: ShellState) -> Status:
        """Run a command of any kind."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ConfigError(
                f"the script can not be read: it runs over {MOST_STEPS} commands. Give the command alone."
            )
        if self.depth == 1:
            self.line = grammar.line_of(node)
        method = getattr(self, f"_{node.type}", None)
        return method(node, state) if method is not None else self.block(node.named_children, state)

    def _command(self, node: Node, state: ShellState, further: Iterable[Node] = ()) -> Status:
        expander = self.expander(state)
        assignments = [child for child in node.named_children if child.type == "variable_assignment"]
        words = expander.words(
            child for child in node.named_children if child.type in _WORDS or child.type == "command_name"
        )
        words += expander.words(further)
        texts = [child for child in node.named_children if child.type == "herestring_redirect"]
        outer, self.stdin = (
            self.stdin,
            expander.text(texts[0].named_children[-1]) + "\n" if texts else self.stdin,
        )
        before = state.fork()
        names = [self.assign(assignment, state) for assignment in assignments]
        status: Status = True
        if words:
            state.exported.update(names)
            status = self.commands.run(words, state)
            self._restore(state, before, names)
        self.stdin = outer if texts else self.stdin
        return status

    def _restore(self, state: ShellState, before: ShellState, names: list[str]) -> None:
        """Take back what was assigned for one command."""
        for name in names:
            state.exported -= {name} - before.exported
            if name in before.variables:
                state.variables[name] = before.variables[name]
            else:
                state.variables.pop(name, None)

    def assign(self, node: Node, state: ShellState, associative: bool = False) -> str:
        """Run an assignment; return the name."""
        expander = self.expander(state)
        target, content = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert target is not None
        named = target.child_by_field_name("name") if target.type == "subscript" else target
        name = grammar.text_of(named) if named is not None else ""
        value: Value
        if content is not None and content.type == "array":
            value = self._array(content, expander, associative or isinstance(state.variables.get(name), dict))
        else:
            value = expander.text(content)
        name = state.named(name)
        added = any(child.type == "+=" for child in node.children)
        if name in state.integers and isinstance(value, str):
            value, added = expander.arithmetic(f"{name}+({value})" if added else value, value), False
        if target.type == "subscript":
            index = target.child_by_field_name("index")
            self._assign_element(
                name, expander.text(index), value if isinstance(value, str) else "", state, added
            )
        elif added:
            state.append(name, value)
        else:
            state.assign(name, value)
        return name

    def _array(self, node: Node, expander: Expander, associative: bool) -> Value:
        keyed = [child for child in node.named_children if re.match(r"\[[^\]]*\]=", grammar.text_of(child))]
        if associative or (
            keyed and len(keyed) == len([child for child in node.named_children if child.type != "comment"])
        ):
            pairs = [expander.text(child).partition("]=") for child in keyed]
            found = {key[1:]: value for key, _, value in pairs}
            return found if associative else [found[key] for key in sorted(found)]
        return expander.words(child for child in node.named_children if child.type != "comment")

    def _assign_element(self, name: str, index: str, value: str, state: ShellState, added: bool) -> None:
        before = state.variables.get(name, [])
        if isinstance(before, dict):
            state.assign(name, before | {index: before.get(index, "") * added + value})
            return
        elements = [before] if isinstance(before, str) else [*before]
        place = self.expander(state).arithmetic(index, index)
        if re.fullmatch(r"\d{1,4}", place):
            elements += [""] * (int(place) + 1 - len(elements))
            elements[int(place)] = elements[int(place)] * added + value
        else:
            elements.append(self.unknowns.mark(f"${name}", "the place of an element is not known"))
        state.assign(name, elements)

    def _variable_assignment(self, node: Node, state: ShellState) -> Status:
        self.assign(node, state)
        return True

    def _declaration_command(self, node: Node, state: ShellState) -> Status:
        """export, declare, local, readonly and typeset."""
        expander = self.expander(state)
        flags = "".join(
            word[1:] for child in node.named_children if (word := grammar.text_of(child)).startswith("-")
        )
        exports = grammar.text_of(node).startswith("export") or "x" in flags
        for child in node.named_children:
            if child.type == "variable_assignment" and "n" in flags:
                name = grammar.text_of(child).partition("=")[0]
                state.references[name] = expander.text(child.child_by_field_name("value"))
            elif child.type == "variable_assignment":
                if "i" in flags:
                    state.integers |= {grammar.text_of(child).partition("=")[0]}
                name = self.assign(child, state, associative="A" in flags)
            elif grammar.text_of(child).startswith("-") or child.type == "comment":
                continue
            else:
                name = self._declared(expander.text(child), flags, exports, state)
            if exports and name:
                state.exported.add(name)
        return True

    def _declared(self, text: str, flags: str, exports: bool, state: ShellState) -> str:
        name, equals, value = text.partition("=")
        if "n" in flags:
            state.references[name] = value
            return ""
        state.integers |= {name} if "i" in flags else set()
        if equals:
            state.assign(name, value)
        elif name not in state.variables and not exports:
            state.assign(name, {} if "A" in flags else [])
        return name

    def _unset_command(self, node: Node, state: ShellState) -> Status:
        names, end = [""], 0
        for child in node.named_children:
            if child.start_byte > end:  # NAME[INDEX] is one word of two nodes
                names.append("")
            names[-1] += self.expander(state).text(child)
            end = child.end_byte
        for name in names:
            if name and not name.startswith("-"):
                state.unset(name)
        return True

    def _function_definition(self, node: Node, state: ShellState) -> Status:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[grammar.text_of(name)] = body
        return True

    def _subshell(self, node: Node, state: ShellState) -> Status:
        return self.block(node.named_children, state.fork())

    def _compound_statement(self, node: Node, state: ShellState) -> Status:
        text = grammar.text_of(node)
        return (
            self._truth(text[2:-2], state)
            if text.startswith("((")
            else self.block(node.named_children, state)
        )

    def _truth(self, expression: str, state: ShellState) -> Status:
        found = self.expander(state).arithmetic(expression, expression)
        return None if has_unknown(found) else found != "0"

    def _negated_command(self, node: Node, state: ShellState) -> Status:
        return negated(self.block(node.named_children, state))

    def _list(self, node: Node, state: ShellState) -> Status:
        """A && B, A || B."""
        first, second = node.named_children[0], node.named_children[-1]
        ends = [child for child in node.children if child.type in ("&&", "||")]
        status = self.run(first, state)
        return self._second(status, ends[-1].type if ends else "&&", second, first, state)

    def _second(
        self, status: Status, sign: str, second: Node, first: Node | None, state: ShellState
    ) -> Status:
        if state.ended or second is first:
            return status
        if status is None:
            found = self._branch(second, state)
            ends = [found[0], state.fork()]
            state.replace(self._joined(state, ends, second, first))
            return both(None, found[1]) if sign == "&&" else negated(both(None, negated(found[1])))
        if status is (sign == "||"):
            return status
        end, result = self._branch(second, state)
        if end.ended == "exit":  # what ends the script where something is missing
            return status
        state.replace(end)
        return result

    def _branch(self, node: Node, state: ShellState) -> tuple[ShellState, Status]:
        own = state.fork()
        return own, self.run(node, own)

    def _joined(
        self, before: ShellState, ends: list[ShellState], node: Node, condition: Node | None
    ) -> ShellState:
        """The state after branches. A variable whose own emptiness is the condition has the default that one
        of them gives it."""
        result = joined(before, ends, self.unknowns, f"under a condition in line {grammar.line_of(node)}")
        for name in re.findall(
            r"\$\{?([A-Za-z_]\w*)", grammar.text_of(condition) if condition is not None else ""
        ):
            given = [end.variables[name] for end in ends if name in end.variables]
            if name not in before.variables and len(given) == 1:
                result.variables[name] = given[0]
        return result

    def _if_statement(self, node: Node, state: ShellState) -> Status:
        """The branches that may be taken, each from the state before it."""
        ends: list[ShellState] = []
        certain = False
        condition: Node | None = None
        for tests, body in _arms(node):
            status: Status = self.block(tests, state) if tests else True
            if status is False:
                continue
            condition = condition or (tests[0] if tests else None)
            own = state.fork()
            self.block(body, own)
            if status is True and not (own.ended == "exit" and tests):
                certain = True
                ends.append(own)
                break
            ends += [own] if own.ended != "exit" else []
        if not certain:
            ends.append(state.fork())
        state.replace(ends[0] if len(ends) == 1 else self._joined(state, ends, node, condition))
        return True if len(ends) == 1 else None

    def _case_statement(self, node: Node, state: ShellState) -> Status:
        expander = self.expander(state)
        subject = node.child_by_field_name("value")
        text, ends, certain = expander.text(subject), [], False
        falls: ShellState | None = None
        for item in (child for child in node.named_children if child.type == "case_item"):
            values = item.children_by_field_name("value")
            status = True if falls else matches(text, [expander.token(value) for value in values])
            if status is False:
                continue
            own = falls or state.fork()
            self.block([child for child in item.named_children if child not in values], own)
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

    def _for_statement(self, node: Node, state: ShellState) -> Status:
        expander = self.expander(state)
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = node.children_by_field_name("value")
        words = expander.words(values) if values else (state.arguments or [])
        name = grammar.text_of(variable) if variable is not None else ""
        known = (
            not any(map(has_unknown, words)) and len(words) <= MOST_ROUNDS and node.children[0].type == "for"
        )
        if known and (values or state.arguments is not None):
            for word in words:
                state.assign(name, word)
                if body is not None and self._round(body, state):
                    break
            return True
        source = self.unknowns.show(" ".join(words)) or "$@"
        self._perhaps(body, state, node, name, f"it is each of {source} in turn")
        return None

    def _round(self, body: Node, state: ShellState) -> bool:
        """Run a round of a loop; return whether it is the last."""
        self.run(body, state)
        last = state.ended not in ("", "continue")
        kind, _, levels = state.ended.partition(" ")
        if kind in ("break", "continue"):
            outer = int(levels or 1) - 1
            state.ended = f"{kind} {outer}" if outer > 1 else kind if outer else ""
        return last

    def _perhaps(
        self, body: Node | None, state: ShellState, node: Node, name: str = "", why: str = ""
    ) -> None:
        """Run a loop of which it is not known how often it runs, once."""
        own = state.fork()
        if name:
            own.assign(name, self.unknowns.mark(f"${name}", why))
        if body is not None:
            self._round(body, own)
        state.replace(
            joined(state, [own, state.fork()], self.unknowns, f"in a loop in line {grammar.line_of(node)}")
        )

    def _c_style_for_statement(self, node: Node, state: ShellState) -> Status:
        found = re.match(
            r"for\s*\(\((.*?);(.*?);(.*?)\)\)\s*(?:;|\n|do|\{)", grammar.text_of(node), re.DOTALL
        )
        body = node.child_by_field_name("body")
        if found is None or body is None:
            return None
        start, test, step = found.groups()
        self._truth(start, state)
        for _ in range(MOST_ROUNDS):
            status = self._truth(test or "1", state)
            if status is None:
                self._perhaps(body, state, node)
                return None
            if not status or self._round(body, state):
                return True
            self._truth(step, state)
        return None

    def _while_statement(self, node: Node, state: ShellState) -> Status:
        tests, body = (
            [child for child in node.children_by_field_name("condition") if child.is_named],
            node.child_by_field_name("body"),
        )
        text = " ".join(map(grammar.text_of, tests))
        if state.arguments is None and _reads_arguments(
            text, grammar.text_of(body) if body is not None else ""
        ):
            return True  # those of the script: it has none
        for _ in range(MOST_ROUNDS):
            status = self.block(tests, state)
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

    def _test_command(self, node: Node, state: ShellState) -> Status:
        text = grammar.text_of(node)
        if text.startswith("(("):
            return self._truth(text[2:-2], state)
        tokens = [
            token for child in node.children[1:-1] for token in self._tokens(child, self.expander(state))
        ]
        condition = Condition(tokens, text.startswith("[["))
        status = condition.value()
        if condition.groups is not None:
            state.assign("BASH_REMATCH", condition.groups)
        return status

    def _tokens(self, node: Node, expander: Expander) -> list[Token]:
        """The words and operators of a condition."""
        if node.type in (
            "binary_expression",
            "unary_expression",
            "parenthesized_expression",
            "negated_command",
            "ternary_expression",
        ):
            return [token for child in node.children for token in self._tokens(child, expander)]
        if not node.is_named or node.type == "test_operator":
            return [Token(grammar.text_of(node).strip())]
        return [expander.token(node)]

    def _pipeline(self, node: Node, state: ShellState) -> Status:
        """Each command has the output of the one before as its input."""
        return self._piped(
            [child for child in node.named_children if child.type != "comment"], state, self.stdin
        )

    def _piped(self, nodes: list[Node], state: ShellState, stdin: str | None) -> Status:
        outer, self.stdin = self.stdin, stdin
        status: Status = True
        for node in nodes[:-1]:
            text, _ = self.captured(partial(self.run, node, state.fork()))
            self.stdin = None if "\0" in text else text
        if nodes:
            status = self.run(nodes[-1], state.fork())
        self.stdin = outer
        return status

    def _redirected_statement(self, node: Node, state: ShellState) -> Status:
        """A command with a here document or files. What is written to a file can be run as a script later."""
        expander = self.expander(state)
        body = node.child_by_field_name("body")
        redirects = [child for child in node.named_children if child.type.endswith("_redirect")]
        heredocs = [each for each in redirects if each.type == "heredoc_redirect"]
        files = [each for each in redirects if each.type == "file_redirect"]
        files += [
            child for each in heredocs for child in each.named_children if child.type == "file_redirect"
        ]
        further = [extra for each in files for extra in each.children_by_field_name("destination")[1:]]
        further += [extra for each in heredocs for extra in each.children_by_field_name("argument")]
        inputs = [each for each in redirects if each.type != "file_redirect"] + [
            each for each in files if "<" in _sign(each)
        ]
        outer, self.stdin = self.stdin, self._input(inputs[0], expander) if inputs else self.stdin

        def run() -> Status:
            if body is None:
                return True
            return self._command(body, state, further) if body.type == "command" else self.run(body, state)

        pipes = [child for each in heredocs for child in each.named_children if child.type == "pipeline"]
        targets = [each for each in files if _sign(each) in (">", ">>", "&>", "&>>", ">|")]
        text, status = self.captured(run) if targets or pipes else ("", run())
        self.stdin = outer if inputs else self.stdin
        for target in targets:
            self._written(expander.text(target.children_by_field_name("destination")[0]), text, _sign(target))
        for pipe in pipes:
            self._piped(pipe.named_children, state, text)
        for each in heredocs:
            if (second := each.child_by_field_name("right")) is not None and (
                sign := each.child_by_field_name("operator")
            ) is not None:
                status = self._second(True if _reads(body) else status, sign.type, second, body, state)
        return status

    def _input(self, redirect: Node, expander: Expander) -> str | None:
        """The text of <<, <<< or <; None if it is not known."""
        if redirect.type == "heredoc_redirect":
            return self._document(redirect, expander)
        source = redirect.named_children[-1]
        if redirect.type == "herestring_redirect":
            return expander.text(source) + "\n"
        if source.type != "process_substitution":
            return self.content(expander.text(source))
        text, _ = self.captured(lambda: self.block(source.named_children, expander.state.fork()))
        return None if "\0" in text else text

    def _written(self, path: str, text: str, sign: str) -> None:
        if not path.startswith("/dev/"):
            text = text.replace("\0", "")
            self.files[path] = self.files.get(path, "") + text if ">>" in sign else text

    def _document(self, node: Node, expander: Expander) -> str:
        body = next((child for child in node.named_children if child.type == "heredoc_body"), None)
        start = next(
            (grammar.text_of(child) for child in node.named_children if child.type == "heredoc_start"), ""
        )
        if body is None:
            return ""
        text = (body.text or b"").decode()
        text = text if re.search(r"[\"'\\]", start) else expander.string(text)
        return re.sub(r"^\t+", "", text, flags=re.MULTILINE) if node.children[0].type == "<<-" else text


_WORDS = frozenset(
    (
        "word",
        "string",
        "raw_string",
        "ansi_c_string",
        "translated_string",
        "number",
        "concatenation",
        "simple_expansion",
        "expansion",
    )
    + (
        "command_substitution",
        "arithmetic_expansion",
        "process_substitution",
        "brace_expression",
        "regex",
        "extglob_pattern",
    )
)


def _reads_arguments(condition: str, body: str) -> bool:
    """Whether a loop goes over positional parameters."""
    over = re.search(r"\$\{?[#1@*]|\bgetopts\b|^\s*(:|true)\s*$", condition)
    return bool(over and re.search(r"\bshift\b|\bgetopts\b", condition + body))


def _sign(redirect: Node) -> str:
    return next((child.type for child in redirect.children if not child.is_named), "")


def _reads(body: Node | None) -> bool:
    """read -d '' fails at the end of its input, although it has read it."""
    return body is not None and grammar.text_of(body).startswith("read")


def _arms(node: Node) -> list[tuple[list[Node], list[Node]]]:
    """The conditions and bodies of an if, its elifs and its else."""
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


def _directives(text: str) -> Iterable[tuple[str, str]]:
    """The variables that Slurm sets from the #SBATCH lines."""
    options: dict[str, str] = {}
    for line in _DIRECTIVE.findall(text):
        for long, short, value in re.findall(r"(?:--([\w-]+)[= ]|-(\w)[= ]?)(\d+)(?=\s|$)", line):
            options[long or short] = value
    found = {name: value for option, value in options.items() for name in _SLURM.get(option, ())}
    if "SLURM_NTASKS" not in found and {"SLURM_NNODES", "SLURM_NTASKS_PER_NODE"} <= found.keys():
        found["SLURM_NTASKS"] = str(int(found["SLURM_NNODES"]) * int(found["SLURM_NTASKS_PER_NODE"]))
    return found.items()
