"""Simple commands: shell builtins, functions, programs that run other commands, and wanted commands."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from megalite.importers.shell.arrays import IndexedArray
from megalite.importers.shell.conditions import Condition, Token
from megalite.importers.shell.programs import PROGRAMS, formatted
from megalite.importers.shell.values import FIRST, LAST, ShellState, Status, checked

if TYPE_CHECKING:
    from megalite.importers.shell.script import Script

SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ksh"))
SUBMITTERS = frozenset(("sbatch", "qsub", "bsub", "srun"))
PREFIXES = frozenset(("command", "builtin", "nohup", "time", "setsid"))
QUIET = frozenset(
    ("echo", "printf", "trap", "alias", "grep", "egrep", "sed", "awk", "logger", "tee", "cat", "module")
)
"""Programs that do not run the text in their arguments."""
SUCCEEDING = frozenset(
    (
        "cd",
        "mkdir",
        "module",
        "ulimit",
        "umask",
        "wait",
        "sleep",
        "hostname",
        "pushd",
        "popd",
        "date",
        "ls",
        "nvidia-smi",
    )
)
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
_ENVIRONMENT = re.compile(
    r"(^|/)(activate|conda\.sh|\.?bashrc|profile|\.bash_profile|lmod\.sh|modules\.sh|setvars\.sh)$|^/"
)
"""Files that set up an environment, and have no options of a training."""
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class Commands:
    """What a simple command does to the state of a script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.within = 1  # getopts' place in a word of several letters
        self.builtins: dict[str, Callable[[list[str], ShellState], Status]] = {
            ":": _succeed,
            "true": _succeed,
            "false": _fail,
            "set": self._set,
            "shift": self._shift,
            "eval": self._eval,
            "read": self._read,
            "source": self._source,
            ".": self._source,
            "printf": self._printf,
            "let": self._let,
            "getopts": self._getopts,
            "exec": self._exec,
            "test": self._test,
            "[": self._test,
            "export": self._export,
            "local": self._export,
            "declare": self._export,
            "pwd": self._directory,
            "mapfile": self._mapfile,
            "readarray": self._mapfile,
            "unset": self.script.assignments.unset,
            **{ending: self._end(ending) for ending in ("exit", "return", "break", "continue")},
        }

    def run(self, words: list[str], state: ShellState) -> Status:
        """Run a command with its words, and record it if it is a wanted one."""
        own = True
        while len(words) > 1 and words[0] in PREFIXES:
            own &= words[0] == "time"
            words = words[1:]
        if words[0] == "env":
            return self._environment(words[1:], state)
        name = words[0]
        if own and name in self.script.functions:
            return self._call(name, words[1:], state)
        if name in self.builtins:
            return self.builtins[name](words[1:], state)
        if self._started(words, state):
            return None
        if posixpath.basename(name) not in QUIET and self.script.wanted(words):
            self.script.record(words)
            return True
        return self._program(words, state)

    def _program(self, words: list[str], state: ShellState) -> Status:
        """Run another program: record its output, if known, and the commands in its arguments."""
        name = posixpath.basename(words[0])
        if name not in QUIET:
            for word in words[1:]:
                if re.search(r"\s", word) and re.search(r"\.py\b|\s-m\s|\btorchrun\b", word) and "--" in word:
                    self.script.run_text(
                        word.partition("=")[2] if re.match(r"--[\w-]+=", word) else word, state.child([], "")
                    )
        output = None
        if name == "cat" and len(words) == 2 and words[1] != "-":
            output = self.script.content(words[1])
        elif (
            name == "xargs"
            and len(words) > 1
            and not words[1].startswith("-")
            and self.script.stdin is not None
        ):
            return self.run([*words[1:], *self.script.stdin.split()], state)
        elif name in PROGRAMS:
            output = PROGRAMS[name](words[1:], self.script.stdin)
        if name == "tee" and output is not None:
            for path in words[1:]:
                self.script.files[path] = output
        if name not in SUCCEEDING or name in ("hostname", "date", "ls", "nvidia-smi"):
            self.script.write("\0" if output is None else output)
        return True if name in SUCCEEDING or output is not None else None

    def _call(self, name: str, arguments: list[str], state: ShellState) -> Status:
        """Run a function, and restore the variables of the caller that are local in it."""
        body = self.script.functions[name]
        before, outer = state.arguments, state.fork()
        state.arguments, state.local_names = arguments, set()
        with self.script.nested():
            status = self.script.run(body, state)
        state.arguments = before
        for variable in state.local_names:
            if variable in outer.variables:
                state.variables[variable] = outer.variables[variable]
            else:
                state.variables.pop(variable, None)
        state.local_names = outer.local_names
        state.references, state.integers = outer.references, outer.integers
        if state.ended == "return":
            state.ended = ""
        return status

    def _environment(self, words: list[str], state: ShellState) -> Status:
        """Run env NAME=VALUE COMMAND."""
        own = state.fork()
        while words and (words[0].startswith("-") or _ASSIGNED.fullmatch(words[0])):
            if assignment := _ASSIGNED.fullmatch(words[0]):
                own.assign(assignment[1], assignment[2])
                own.exported.add(assignment[1])
            words = words[2:] if words[0] in ("-u", "--unset") else words[1:]
        return self.run(words, own) if words else None

    def _started(self, words: list[str], state: ShellState) -> bool:
        """Return whether the command starts a shell or a script that can be read, which is then run."""
        for place, word in enumerate(words):
            name = posixpath.basename(word)
            if name in SHELLS:
                return self._shell(words[place + 1 :], state)
            if word.endswith(SCRIPTS) and (place == 0 or posixpath.basename(words[0]) in SUBMITTERS):
                return self._file(word, words[place + 1 :], state, True)
            if word.endswith(".py"):
                break
        if posixpath.basename(words[0]) not in SUBMITTERS:
            return False
        wraps = [
            self._option(words, place)
            for place, word in enumerate(words)
            if word.partition("=")[0] == "--wrap"
        ]
        if wraps:
            self.script.run_text(wraps[0], state.child([], ""))
        elif self.script.stdin is not None and posixpath.basename(words[0]) != "srun":
            self.script.run_text(self.script.stdin, state.child([], ""))
        else:
            return False
        return True

    def _option(self, words: list[str], place: int) -> str:
        name, equals, value = words[place].partition("=")
        return value if equals else words[place + 1] if place + 1 < len(words) else ""

    def _shell(self, words: list[str], state: ShellState) -> bool:
        """Run bash -c TEXT, bash FILE, or bash with commands as its input."""
        while words and words[0][:1] in ("-", "+"):
            flags, words = words[0], words[1:]
            if flags == "-s":
                break
            if flags in ("-o", "+o", "--rcfile", "--init-file"):
                words = words[1:]
            elif "c" in flags and not flags.startswith("--"):
                while words and words[0].startswith("-"):
                    words = words[1:]
                if words:
                    self.script.run_text(words[0], state.child(words[2:], (words[1:2] or ["bash"])[0]))
                return True
        else:
            if words:
                return self._file(words[0], words[1:], state, True)
        if self.script.stdin is not None:
            self.script.run_text(self.script.stdin, state.child(words, ""))
        return True

    def _file(self, path: str, arguments: list[str], state: ShellState, new: bool) -> bool:
        """Run a script that this one has written, or one beside it.

        Args:
            new: in a process of its own.
        """
        known = re.split(f"[{chr(FIRST)}-{chr(LAST)}]", path)
        text = self.script.content(
            path if len(known) == 1 or path in self.script.files else known[-1].lstrip("/")
        )
        if text is None:
            if not _ENVIRONMENT.search(path):
                self.script.note("source", path)
            return False
        own = state.child(arguments, path) if new else state
        before = state.arguments
        if not new and arguments:
            own.arguments = arguments
        self.script.run_text(text, own)
        if not new:
            state.arguments = before
            state.ended = "" if state.ended == "return" else state.ended
        return True

    def _source(self, words: list[str], state: ShellState) -> Status:
        if words:
            self._file(words[0], words[1:], state, False)
        return True

    def _eval(self, words: list[str], state: ShellState) -> Status:
        return self.script.run_text(" ".join(words), state)

    def _set(self, words: list[str], state: ShellState) -> Status:
        rest = words
        while rest and rest[0][:1] in ("-", "+") and rest[0] != "--":
            rest = rest[2 if rest[0].endswith("o") else 1 :]
        if rest:
            state.arguments = rest[rest[0] == "--" :]
        if words[:1] == ["-a"] or words[:2] == ["-o", "allexport"]:
            state.export_all = True
        elif words[:1] == ["+a"] or words[:2] == ["+o", "allexport"]:
            state.export_all = False
        return True

    def _shift(self, words: list[str], state: ShellState) -> Status:
        if state.arguments is not None:
            state.arguments = state.arguments[int(words[0]) if words and words[0].isdigit() else 1 :]
        return True

    def _getopts(self, words: list[str], state: ShellState) -> Status:
        """Run getopts LETTERS NAME [ARGUMENT …].

        It sets NAME to the next option, OPTARG to its argument, and OPTIND to the next index.
        """
        if state.arguments is None and len(words) < 3:
            state.assign(
                words[1] if len(words) > 1 else "?",
                self.script.unknowns.mark("$@", "an argument of the script"),
            )
            return None
        arguments, index = words[2:] or state.arguments or [], state.variables.get("OPTIND", "1")
        place = int(index) if isinstance(index, str) and index.isdigit() else 1
        word = arguments[place - 1] if 0 < place <= len(arguments) else ""
        letter = word[self.within : self.within + 1]
        if not letter or word[:1] != "-" or word == "--":
            state.assign(words[1], "?")
            state.assign("OPTIND", str(place + (word == "--")))
            return False
        _, known, after = words[0].lstrip(":").partition(letter)
        rest = word[self.within + 1 :]
        takes = known != "" and after.startswith(":")
        self.within = 1 if takes or not rest else self.within + 1
        if takes:
            state.assign("OPTARG", rest or "".join(arguments[place : place + 1]))
        state.assign(words[1], letter if known else "?")
        state.assign("OPTIND", str(place + (0 if rest and not takes else 1 if rest or not takes else 2)))
        return True

    def _exec(self, words: list[str], state: ShellState) -> Status:
        """Run exec COMMAND, which replaces the shell."""
        status = self.run(words, state) if words else True
        state.ended = "exit" if words else state.ended
        return status

    def _read(self, words: list[str], state: ShellState) -> Status:
        """Run read, which reads the whole input with -d '', otherwise its first line.

        The input is split if there are several names or with -a.
        """
        names: list[str] = []
        whole = array = False
        while words:
            word, words = words[0], words[1:]
            if word.startswith("-"):
                array |= "a" in word[1:]
                if word[-1] in "dnNpitu":
                    whole |= word[-1] == "d" and words[:1] == [""]
                    words = words[1:]
            else:
                names.append(word)
        text = self.script.stdin
        if text is None:
            for name in names:
                state.assign(name, self.script.unknowns.mark(f"${name}", "read from standard input"))
            return None
        separators = state.separators
        line, end, rest = (text, "", "") if whole else text.partition("\n")
        self.script.stdin = rest
        if array and names:
            state.assign(names[0], IndexedArray.of(_split(line, separators)))
        else:
            several = len(names) > 1
            fields = _split(line, separators, len(names)) if several else [line.strip(_spaces(separators))]
            for place, name in enumerate(names):
                state.assign(name, "".join(fields[place : place + 1]))
        return bool(end)

    def _mapfile(self, words: list[str], state: ShellState) -> Status:
        names = [word for word in words if not word.startswith("-")]
        text = self.script.stdin
        if names:
            unknown = self.script.unknowns.mark(f"${names[-1]}", "read from standard input")
            state.assign(names[-1], IndexedArray.of([unknown] if text is None else text.splitlines()))
        return True

    def _printf(self, words: list[str], state: ShellState) -> Status:
        if words[:1] == ["-v"] and len(words) > 2:
            text = formatted(words[2:])
            state.assign(
                words[1],
                self.script.unknowns.mark(f"${words[1]}", "formatted text") if text is None else text,
            )
        else:
            text = formatted([word for word in words if word != "--"])
            self.script.write("\0" if text is None else text)
        return True

    def _let(self, words: list[str], state: ShellState) -> Status:
        for word in words:
            self.script.expander(state).arithmetic(word, word)
        return True

    def _test(self, words: list[str], state: ShellState) -> Status:
        return Condition([Token(word) for word in words if word != "]"], False).value()

    def _export(self, words: list[str], state: ShellState) -> Status:
        for word in words:
            if assignment := _ASSIGNED.fullmatch(word):
                state.assign(assignment[1], checked(assignment[2]))
            if not word.startswith("-"):
                state.exported.add(word.partition("=")[0])
        return True

    def _directory(self, words: list[str], state: ShellState) -> Status:
        self.script.write("\0")
        return True

    def _end(self, ending: str) -> Callable[[list[str], ShellState], Status]:
        def run(words: list[str], state: ShellState) -> Status:
            loops = (
                words[0]
                if ending in ("break", "continue") and words and words[0].isdigit() and int(words[0]) > 1
                else ""
            )
            state.ended = f"{ending} {loops}".rstrip()
            return words[:1] in ([], ["0"])

        return run


def _spaces(separators: str) -> str:
    return "".join(each for each in separators if each.isspace())


def _split(line: str, separators: str, most: int = 0) -> list[str]:
    """Return the fields of a line, the last one with the rest of the line.

    Between separators other than spaces, a field can be empty.
    """
    spaces, others = _spaces(separators), "".join(each for each in separators if not each.isspace())
    line = line.strip(spaces)
    if not line or not separators:
        return [line] if line else []
    space = f"[{re.escape(spaces)}]" if spaces else "(?!)"
    fields = re.split(
        f"{space}*[{re.escape(others)}]{space}*|{space}+" if others else f"{space}+",
        line,
        maxsplit=max(most - 1, 0),
    )
    return fields[:-1] if fields[-1] == "" else fields


def _succeed(words: list[str], state: ShellState) -> Status:
    return True


def _fail(words: list[str], state: ShellState) -> Status:
    return False
