"""A run as a job on a cluster: its nodes, and what each of them runs, whichever scheduler starts it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalite.config.errors import ConfigError

COLUMNS = 110
"""Width of the commands in a specification."""
LIKE_A_NUMBER = re.compile(r"[-+]?\.?\d[\w.+-]*|[yYnN]")
"""Texts that some version of YAML reads as a number or a boolean. PyYAML quotes those that it
reads so itself: not 3e-4, which is a number for kubectl."""
MODULE = ("-m", "megalite", "train")


@dataclass(frozen=True)
class Mount:
    """A directory of the nodes or of a storage service, at a path that the ranks see.

    Attributes:
        source: a path, the name of a volume (claim), or the URL of a bucket.
        target: an absolute path.
    """

    source: str
    target: str
    read_only: bool = False

    @classmethod
    def read(cls, text: str) -> Mount:
        """Parse SOURCE:TARGET[:ro]. Raises ConfigError if the text is not of this form."""
        plain = text.removesuffix(":ro")
        source, separator, target = plain.rpartition(":/")
        if not (separator and source):
            raise ConfigError(
                f"--mount {text} is not SOURCE:TARGET with an absolute path as TARGET. Write it as in "
                "--mount shared:/shared, with :ro at the end if it is read-only."
            )
        return cls(source, f"/{target}", plain != text)

    def holds(self, path: str) -> bool:
        """Whether a path is below the mount."""
        return f"{path}/".startswith(f"{self.target.rstrip('/')}/")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, and the number of ranks on each."""

    count: int
    ranks: int

    @property
    def world(self) -> int:
        return self.count * self.ranks

    def __str__(self) -> str:
        return f"{self.count} node{'s' * (self.count > 1)} of {self.ranks} rank{'s' * (self.ranks > 1)}"


@dataclass(frozen=True)
class ClusterJob:
    """A job.

    Attributes:
        name: of the job, also a valid name in Kubernetes.
        about: lines of the comment at the beginning of the specification.
        nodes: their number, and the ranks on each.
        gpus: whether each rank has a GPU; otherwise it runs on the CPU.
        arguments: those of `megalite train`.
        python: the interpreter on the nodes.
        environment: variables of the ranks.
        mounts: directories that the ranks see.
        image: of the container; None: no container.
        restarts: how often the ranks are started again after one of them has failed.
        port: of the rendezvous, on the first node.
        cpus: cores per node; None: not requested.
        memory: memory per node, in the scheduler's units; None: not requested.
        grace_s: seconds that the ranks have to save before the job is ended.
        time_s: seconds after which the scheduler ends the job; None: its default.
    """

    name: str
    about: tuple[str, ...]
    nodes: Nodes
    gpus: bool
    arguments: tuple[str, ...]
    python: str = "python"
    environment: dict[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    image: str | None = None
    restarts: int = 3
    port: int = 29500
    cpus: int | None = None
    memory: str | None = None
    grace_s: int = 300
    time_s: int | None = None

    @property
    def comment(self) -> str:
        """The lines of `about` as comments, in all four languages."""
        return "\n".join(f"# {line}" for line in self.about) + "\n"

    @property
    def launcher(self) -> list[str]:
        """The command of a node up to its rendezvous."""
        ranks = ["--nproc", str(self.nodes.ranks), "--max_restarts", str(self.restarts)]
        return [self.python, *MODULE, *ranks]

    def rendezvous(self, endpoint: str) -> list[str]:
        """The options with which the nodes meet at HOST:PORT; one node meets nobody."""
        if self.nodes.count == 1:
            return []
        return ["--nnodes", str(self.nodes.count), "--rdzv_endpoint", endpoint]

    def command(self, endpoint: str) -> list[str]:
        """The words that each node runs; `endpoint` is the HOST:PORT where the nodes meet."""
        return [*self.launcher, *self.rendezvous(endpoint), *self.arguments]

    def shell_command(self, endpoint: str, first: Sequence[str] = ()) -> str:
        """The command of a node for a shell, over several lines.

        Args:
            endpoint: an expression of the shell, quoted where it needs to be.
            first: lines before the command, already quoted.
        """
        meeting = [word if word == endpoint else shlex.quote(word) for word in self.rendezvous(endpoint)]
        words = [*map(shlex.quote, self.launcher), *meeting, *map(shlex.quote, self.arguments)]
        return " \\\n    ".join([*first, *_lines(words)])


def _lines(words: Iterable[str]) -> list[str]:
    """Words in lines that are not too long; an option starts a line rather than ends one."""
    groups: list[str] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append(word)
        else:
            groups[-1] += f" {word}"
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) + 8 > COLUMNS:
            lines.append(group)
        else:
            lines[-1] += f" {group}"
    return lines


def as_yaml(content: Any) -> str:
    """Plain data as YAML, with a text of several lines as such."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: Dumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else "'" if LIKE_A_NUMBER.fullmatch(value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=140)


def job_name(text: str) -> str:
    """The nearest name to a run's that a job of every scheduler may have: lowercase letters, digits and
    dashes, from a letter on."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-"))[:40].rstrip("-")


def nodes_for_world(
    world: int | None, nodes: int | None, ranks: int | None, per_node: int | None, layout: str
) -> Nodes:
    """The nodes that a world of ranks fills.

    Args:
        world: tp · pp · cp · dp; None if dp fills the nodes.
        nodes, ranks: of --nnodes and --nproc; None if they follow.
        per_node: GPUs of a node; None on the CPU, where --nproc says how many ranks a node has.
        layout: the layout, for messages.

    Raises:
        ConfigError: the world does not fill the nodes.
    """
    size = ranks or per_node
    if world is None:
        if nodes is None:
            raise ConfigError(
                "The number of nodes is unknown, because parallel.dp is not set. Set --dp N or --nnodes N."
            )
        if size is None:
            raise ConfigError("The number of ranks per node is unknown. Set --nproc N.")
        return Nodes(nodes, size)
    if nodes is None:
        if size is None or (ranks is None and world <= size):
            return Nodes(1, world)
        if world % size == 0:
            return Nodes(world // size, size)
        whole = next(count for count in range(-(-world // size), world + 1) if world % count == 0)
        raise ConfigError(
            f"{layout} = {world} ranks do not fill nodes of {size}: they need {world / size:.3g}. Change "
            f"parallel.dp, or set --nproc {world // whole} for {whole} nodes of {world // whole} ranks."
        )
    if world % nodes or (ranks is not None and nodes * ranks != world):
        wanted = f"--nnodes {nodes}" + (f" and --nproc {ranks}" if ranks is not None else "")
        raise ConfigError(
            f"{layout} = {world} ranks do not fit {wanted}. The product of nodes and ranks per node must be "
            f"{world}: leave out one of the two options, or change parallel.dp."
        )
    if per_node is not None and ranks is None and world // nodes > per_node:
        raise ConfigError(
            f"--nnodes {nodes} puts {world // nodes} of the {world} ranks on a node of {per_node} GPUs. Set "
            f"--nnodes {-(-world // per_node)} or more, or --nproc {world // nodes} if a node has as many."
        )
    return Nodes(nodes, world // nodes)
