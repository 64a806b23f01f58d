"""Every key of the configuration is read by code that acts on it, not only by the code that checks it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from megalite.config.schema import OPTIONS, Config
from tests.structure.sources import PROGRAM, ROOT

SECTIONS = {section.name: section.type.__name__ for section in fields(Config)}
KEYS = set(OPTIONS)
CONFIG = ROOT / "megalite" / "config"
LOADING = CONFIG / "load.py"


def sections() -> str:
    """The source of all sections."""
    return "\n".join(path.read_text() for path in sorted((CONFIG / "sections").glob("*.py")))


def unread(sources: Iterable[str], loading: str, schema: str) -> set[str]:
    """Keys that no source reads. In `loading`, which derives keys from others, the string "section.key" is a read."""
    derived = derived_keys(ast.parse(schema))
    read = {node.value for node in ast.walk(ast.parse(loading)) if isinstance(node, ast.Constant)}
    for source in sources:
        for key in reads(ast.parse(source)):
            read |= {key} | derived.get(key, set())
    return KEYS - read


def reads(tree: ast.Module) -> Iterator[str]:
    """section.attribute of every attribute that is read from a configuration section or from an alias of one."""
    names = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            for section in {section_of(node.value), *names.get(ast.unparse(node.value), ())} - {None}:
                yield f"{section}.{node.attr}"


def section_of(node: ast.expr) -> str | None:
    """`config.train`, `self.config.train` … → train."""
    if (
        isinstance(node, ast.Attribute)
        and node.attr in SECTIONS
        and ast.unparse(node.value).split(".")[-1].strip("_") in ("config", "saved", "c")
    ):
        return node.attr
    return None


class Aliases:
    """The aliases of sections in one file: names annotated with a section's class, or assigned from a section.

    Annotations are visited first.
    """

    def __init__(self) -> None:
        self.sections: dict[str, set[str]] = {}

    def argument(self, node: ast.arg) -> None:
        self._annotate(node.arg, node.annotation)

    def annotated(self, node: ast.AnnAssign) -> None:
        self._annotate(ast.unparse(node.target), node.annotation)

    def _annotate(self, name: str, annotation: ast.expr | None) -> None:
        words = set(ast.unparse(annotation).replace("'", "").replace('"', "").split(" | ")) if annotation else set()
        for section, kind in SECTIONS.items():
            if kind in words:
                self.sections.setdefault(name, set()).add(section)
                self.sections.setdefault(f"self.{name}", set()).add(section)  # a dataclass's field

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for name, element in zip(target.elts, value.elts, strict=True):
                self.bind(name, element)
            return
        for branch in [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]:
            named = section_of(branch)
            if named is not None:
                self.sections.setdefault(ast.unparse(target), set()).add(named)
            elif isinstance(branch, ast.Name | ast.Attribute):  # an alias of an alias, as in self.model = model
                self.sections.setdefault(ast.unparse(target), set()).update(self.sections.get(ast.unparse(branch), ()))


def aliases(tree: ast.Module) -> dict[str, set[str]]:
    """The aliases of sections in one file: name → sections."""
    names = Aliases()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.arg):
            names.argument(node)
        elif isinstance(node, ast.AnnAssign):
            names.annotated(node)
    for node in nodes:
        if isinstance(node, ast.Assign):
            names.bind(node.targets[0], node.value)
    return names.sections


def derived_keys(schema: ast.Module) -> dict[str, set[str]]:
    """section.method → the keys that this property or method of the section's class reads."""
    keys: dict[str, set[str]] = {}
    for kind in (node for node in schema.body if isinstance(node, ast.ClassDef)):
        for section in (section for section, name in SECTIONS.items() if name == kind.name):
            for method in (node for node in kind.body if isinstance(node, ast.FunctionDef)):
                attributes = [node for node in ast.walk(method) if isinstance(node, ast.Attribute)]
                own = [node.attr for node in attributes if ast.unparse(node.value) == "self"]
                keys[f"{section}.{method.name}"] = {f"{section}.{name}" for name in own}
    return keys


def acting(paths: Iterable[Path]) -> list[str]:
    """The sources that act on the configuration.

    megalite/config/ only defines and checks it, except for dims.py, which derives sizes, and run_length.py, which
    resolves the length of the run.
    """
    return [
        path.read_text() for path in paths if CONFIG not in path.parents or path.name in ("dims.py", "run_length.py")
    ]


def test_every_key_is_read():
    assert unread(acting(PROGRAM), LOADING.read_text(), sections()) == set()


def test_reads_are_attributed_to_their_section():
    source = """
def step(config, metrics, options: OptimizerConfig, train: TrainConfig | None):
    model, data = config.model, config.data
    model.head_size, data.shuffle, options.eps, train.steps, self.config.run.seed
    metrics.lr, metrics.tp, config.tp
    config.logging.interval = 3
"""
    missing = unread([source], "preset = given.get('model.preset')", sections())
    read = {f"model.{name}" for name in ("head_dim", "hidden_size", "num_attention_heads", "preset")}
    read |= {f"model.{name}" for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
    assert KEYS - missing == read | {"data.shuffle", "optimizer.eps", "train.steps", "run.seed"}
