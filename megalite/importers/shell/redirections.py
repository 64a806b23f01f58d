"""Pipelines, here documents and files of a script: what each command reads and where its output goes."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from megalite.importers.shell import grammar
from megalite.importers.shell.expansion import Expander
from megalite.importers.shell.values import ShellState, Status

if TYPE_CHECKING:
    from tree_sitter import Node

    from megalite.importers.shell.script import Script


class Redirections:
    """Runs commands whose input or output is redirected. The files that they write can be read later."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def pipeline(self, node: Node, state: ShellState) -> Status:
        """Run a pipeline, in which each command reads the output of the previous one."""
        commands = [child for child in node.named_children if child.type != "comment"]
        return self._piped(commands, state, self.script.stdin)

    def _piped(self, nodes: list[Node], state: ShellState, stdin: str | None) -> Status:
        outer, self.script.stdin = self.script.stdin, stdin
        status: Status = True
        for node in nodes[:-1]:
            text, _ = self.script.captured(partial(self.script.run, node, state.fork()))
            self.script.stdin = None if "\0" in text else text
        if nodes:
            status = self.script.run(nodes[-1], state.fork())
        self.script.stdin = outer
        return status

    def redirected_statement(self, node: Node, state: ShellState) -> Status:
        """Return a command with a here document or files.

        A file that it writes can be run as a script later.
        """
        expander = self.script.expander(state)
        body = node.child_by_field_name("body")
        redirects = [child for child in node.named_children if child.type.endswith("_redirect")]
        heredocs = [redirect for redirect in redirects if redirect.type == "heredoc_redirect"]
        in_heredocs = [child for heredoc in heredocs for child in heredoc.named_children]
        files = [child for child in (*redirects, *in_heredocs) if child.type == "file_redirect"]
        # the grammar counts words after a redirection to it
        further = [word for file in files for word in file.children_by_field_name("destination")[1:]]
        further += [word for heredoc in heredocs for word in heredoc.children_by_field_name("argument")]
        inputs = [redirect for redirect in redirects if redirect.type != "file_redirect"]
        inputs += [file for file in files if "<" in operator_of(file)]
        outer = self.script.stdin
        if inputs:
            self.script.stdin = self._input(inputs[0], expander)

        def run() -> Status:
            if body is None:
                return True
            if body.type == "command":
                return self.script.run_command(body, state, further)
            return self.script.run(body, state)

        pipes = [child for child in in_heredocs if child.type == "pipeline"]
        outputs = [file for file in files if operator_of(file) in (">", ">>", "&>", "&>>", ">|")]
        text, status = self.script.captured(run) if outputs or pipes else ("", run())
        if inputs:
            self.script.stdin = outer
        for file in outputs:
            path = expander.text(file.children_by_field_name("destination")[0])
            self._write(path, text, append=">>" in operator_of(file))
        for pipe in pipes:
            self._piped(pipe.named_children, state, text)
        for heredoc in heredocs:
            second, sign = heredoc.child_by_field_name("right"), heredoc.child_by_field_name("operator")
            if second is not None and sign is not None:
                first_status = True if _reads(body) else status
                status = self.script.flow.second(first_status, sign.type, second, body, state)
        return status

    def _input(self, redirect: Node, expander: Expander) -> str | None:
        """Return the input of <<, <<< or <, or None if it is unknown."""
        if redirect.type == "heredoc_redirect":
            return self._document(redirect, expander)
        source = redirect.named_children[-1]
        if redirect.type == "herestring_redirect":
            return expander.text(source) + "\n"
        if source.type != "process_substitution":
            return self.script.content(expander.text(source))
        commands, inner = source.named_children, expander.state.fork()
        text, _ = self.script.captured(lambda: self.script.block(commands, inner))
        return None if "\0" in text else text

    def _write(self, path: str, text: str, append: bool) -> None:
        if path.startswith("/dev/"):
            return
        before = self.script.files.get(path, "") if append else ""
        self.script.files[path] = before + text.replace("\0", "")

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


def operator_of(redirect: Node) -> str:
    """Return the sign of a redirection, such as >>."""
    return next((child.type for child in redirect.children if not child.is_named), "")


def _reads(body: Node | None) -> bool:
    """read -d '' fails at the end of its input, although it has read it."""
    return body is not None and grammar.text_of(body).startswith("read")
