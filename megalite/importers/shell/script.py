"""The commands that a shell script starts, with the words they get.

Nothing is executed, and this process's environment is not read.

A script is followed as bash would run it, over values of which some are not known: variables from outside,
outputs of programs, and what is set differently in branches whose condition is not known. Such parts keep
their text and have a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from megalite.config.errors import ConfigError
from megalite.importers.shell import grammar
from megalite.importers.shell.arrays import IndexedArray
from megalite.importers.shell.assignments import Assignments
from megalite.importers.shell.commands import Commands
from megalite.importers.shell.conditions import Condition, Token, negated
from megalite.importers.shell.control_flow import ControlFlow
from megalite.importers.shell.expansion import Expander
from megalite.importers.shell.redirections import Redirections, operator_of
from megalite.importers.shell.values import ShellState, Status, Unknowns, Word, as_array, has_unknown

if TYPE_CHECKING:
    from tree_sitter import Node

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
MOST_STEPS, DEEPEST = 20_000, 40
"""Limits of the commands that are run, and of scripts and functions within each other."""


class ScriptCommand(NamedTuple):
    """A command of a script: its words, and where it begins."""

    words: list[Word]
    line: int


class ScriptResult(NamedTuple):
    """The commands that a script runs.

    Attributes:
        runs: the commands that are wanted.
        unread: kind → texts that were not understood, or not read.
        variables: name → the words of its value at the end of the script.
    """

    runs: list[ScriptCommand]
    unread: dict[str, list[str]]
    variables: dict[str, list[Word]]


def commands(
    text: str,
    wanted: Callable[[list[str]], bool],
    read: Callable[[str], str | None] = lambda path: None,
    name: str = "",
) -> ScriptResult:
    """Return the `wanted` commands of a script in the order in which they would run.

    Args:
        wanted: whether a command with these words is wanted.
        read: path of another file → its text; None if there is none.
        name: the script's own path.

    Raises:
        ConfigError: the script does not end, or is nested without end.
    """
    script = Script(wanted, read)
    state = ShellState(program=name)
    try:
        script.run_text(text, state)
    except RecursionError:
        raise ConfigError(
            "Could not parse the script: it is nested too deeply. Pass only the training command."
        ) from None
    words = {}
    for key, value in state.variables.items():
        texts = value.values() if isinstance(value, dict) else as_array(value).elements
        words[key] = [script.unknowns.word(word) for text in texts for word in text.split()]
    return ScriptResult(script.runs, script.unread, words)


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
        self.substitution_status: Status = True
        """The status of the last $(…): the status of a command that has no words but assignments."""
        self.assignments = Assignments(self)
        self.commands = Commands(self)
        self.flow = ControlFlow(self)
        self.redirections = Redirections(self)
        self._handlers: dict[str, Callable[[Node, ShellState], Status]] = {
            "command": self.run_command,
            "variable_assignment": self._assignments,
            "variable_assignments": self._assignments,
            "declaration_command": self.assignments.declare,
            "unset_command": self.assignments.unset_command,
            "function_definition": self._function_definition,
            "subshell": self._subshell,
            "compound_statement": self._compound_statement,
            "negated_command": self._negated_command,
            "test_command": self._test_command,
            "list": self.flow.and_or,
            "if_statement": self.flow.if_statement,
            "case_statement": self.flow.case_statement,
            "for_statement": self.flow.for_statement,
            "c_style_for_statement": self.flow.c_style_for_statement,
            "while_statement": self.flow.while_statement,
            "pipeline": self.redirections.pipeline,
            "redirected_statement": self.redirections.redirected_statement,
        }

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Run a script or a function within the current one. Raises RecursionError beyond DEEPEST."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise RecursionError
        yield
        self.depth -= 1

    def run_text(self, text: str, state: ShellState) -> Status:
        """Run a script or the text of a command."""
        with self.nested():
            return self._run_text(text, state)

    def _run_text(self, text: str, state: ShellState) -> Status:
        if self.depth == 1:
            text = grammar.without_private_characters(text)
        text = self._placeholders(text).replace("\r\n", "\n")
        for name, value in _directives(text):
            if name not in state.variables:
                state.assign(name, value)
                state.exported.add(name)
        tree = grammar.parse(text)
        for error in grammar.errors(tree):
            if grammar.open_quote(error, len(text.rstrip().encode())):
                where = grammar.line_of(error) if self.depth == 1 else self.line
                raise ConfigError(f"Could not parse the script: unterminated quote in line {where}.")
            self.note("line", f"{grammar.line_of(error)}: {' '.join(grammar.text_of(error).split())[:60]}")
        return self.block(tree.named_children, state)

    def _placeholders(self, text: str) -> str:
        """Replace <a placeholder> by an unknown part instead of a redirection."""
        return _PLACEHOLDER.sub(lambda match: self.unknowns.mark(match[0], "a placeholder"), text)

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
        """Call `run`; return the output of its commands, and its status."""
        outer, self.sink = self.sink, []
        status = run()
        text, self.sink = "".join(self.sink), outer
        return text, status

    def substituted(self, node: Node, state: ShellState) -> str:
        """Return the output of $(…). An unknown output is shown as the whole substitution."""
        source = grammar.text_of(node)
        if source.startswith("`"):
            inner = re.sub(r"\\([`$\\])", r"\1", source[1:-1])
            text, status = self.captured(lambda: self.run_text(inner, state.fork()))
        else:
            text, status = self.captured(lambda: self._shown(node, state.fork()))
        self.substitution_status = status
        return re.sub("\0+", lambda _: self.unknowns.mark(source, "the output of a command"), text)

    def _shown(self, node: Node, state: ShellState) -> Status:
        """Return the commands in $(…), or the file of $(< FILE)."""
        redirects = [child for child in node.named_children if child.type == "file_redirect"]
        files = [redirect for redirect in redirects if operator_of(redirect) == "<"]
        if not files or len(node.named_children) > 1:
            return self.block(node.named_children, state)
        text = self.content(self.expander(state).text(files[0].child_by_field_name("destination")))
        self.write("\0" if text is None else text)
        return None if text is None else True

    def content(self, path: str) -> str | None:
        """Return the text of a file that the script has written or that is next to it, or None."""
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
                f"Could not follow the script: it runs more than {MOST_STEPS} commands. Pass only the "
                "training command."
            )
        if self.depth == 1:
            self.line = grammar.line_of(node)
        handler = self._handlers.get(node.type)
        return self.block(node.named_children, state) if handler is None else handler(node, state)

    def run_command(self, node: Node, state: ShellState, further: Iterable[Node] = ()) -> Status:
        """Run a simple command.

        Args:
            further: words of it that the grammar counts to its redirections.
        """
        self.substitution_status = True
        expander = self.expander(state)
        assignments = [child for child in node.named_children if child.type == "variable_assignment"]
        words = expander.words(
            child for child in node.named_children if child.type in _WORDS or child.type == "command_name"
        )
        words += expander.words(further)
        texts = [child for child in node.named_children if child.type == "herestring_redirect"]
        outer = self.stdin
        if texts:
            self.stdin = expander.text(texts[0].named_children[-1]) + "\n"
        before = state.fork()
        names = [self.assignments.assign(assignment, state) for assignment in assignments]
        if words:
            state.exported.update(names)
            status = self.commands.run(words, state)
            self.assignments.restore(state, before, names)
        else:
            status = self.substitution_status
        self.stdin = outer if texts else self.stdin
        return status

    def _assignments(self, node: Node, state: ShellState) -> Status:
        """Run A=1, or A=1 B=2."""
        self.substitution_status = True
        for assignment in [node] if node.type == "variable_assignment" else node.named_children:
            self.assignments.assign(assignment, state)
        return self.substitution_status

    def _function_definition(self, node: Node, state: ShellState) -> Status:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[grammar.text_of(name)] = body
        return True

    def _subshell(self, node: Node, state: ShellState) -> Status:
        return self.block(node.named_children, state.fork())

    def _compound_statement(self, node: Node, state: ShellState) -> Status:
        text = grammar.text_of(node)
        if text.startswith("(("):
            return self.truth(text[2:-2], state)
        return self.block(node.named_children, state)

    def truth(self, expression: str, state: ShellState) -> Status:
        """Return the status of ((expression))."""
        value = self.expander(state).arithmetic(expression, expression)
        return None if has_unknown(value) else value != "0"

    def _negated_command(self, node: Node, state: ShellState) -> Status:
        return negated(self.block(node.named_children, state))

    def _test_command(self, node: Node, state: ShellState) -> Status:
        text = grammar.text_of(node)
        if text.startswith("(("):
            return self.truth(text[2:-2], state)
        expander = self.expander(state)
        tokens = [token for child in node.children[1:-1] for token in self._tokens(child, expander)]
        condition = Condition(tokens, text.startswith("[["))
        status = condition.value()
        if condition.groups is not None:
            state.assign("BASH_REMATCH", IndexedArray.of(condition.groups))
        return status

    def _tokens(self, node: Node, expander: Expander) -> list[Token]:
        """Return the words and operators of a condition."""
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


_WORDS = frozenset(
    [
        "word",
        "string",
        "raw_string",
        "ansi_c_string",
        "translated_string",
        "number",
        "concatenation",
        "simple_expansion",
        "expansion",
        "command_substitution",
        "arithmetic_expansion",
        "process_substitution",
        "brace_expression",
        "regex",
        "extglob_pattern",
    ]
)
"""The grammar's types of words."""


def _directives(text: str) -> Iterable[tuple[str, str]]:
    """Return the variables that Slurm sets from the #SBATCH lines."""
    options: dict[str, str] = {}
    for line in _DIRECTIVE.findall(text):
        for long, short, value in re.findall(r"(?:--([\w-]+)[= ]|-(\w)[= ]?)(\d+)(?=\s|$)", line):
            options[long or short] = value
    variables = {name: value for option, value in options.items() for name in _SLURM.get(option, ())}
    if "SLURM_NTASKS" not in variables and {"SLURM_NNODES", "SLURM_NTASKS_PER_NODE"} <= variables.keys():
        tasks = int(variables["SLURM_NNODES"]) * int(variables["SLURM_NTASKS_PER_NODE"])
        variables["SLURM_NTASKS"] = str(tasks)
    return variables.items()
