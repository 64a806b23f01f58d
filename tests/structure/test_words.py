"""Identifiers use the field's words: those that the first version invented stay away. Values, keys and file formats are
not looked at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure.sources import PROGRAM, relative

INSTEAD = {
    **{"Closing": "WeightUpdater", "settle": "drain", "validate_step": "confirm"},
    **{"Residency": "WeightGatherer", "residency": "gatherer", "WeightGradients": "WeightGradQueue"},
    **{"BucketMemory": "BucketBuffers", "BucketGradients": "GradientBucket"},
    **{
        "apart": "separate_embedding_grad",
        "_apart": "separate_embedding_grad",
        "keep_apart": "separate_embedding_grad",
    },
    **{
        "forget": "release_grad",
        "one_contribution": "accumulate_as_one",
        "_fresh": "uninitialized",
        "fresh_gradients": "uninitialized",
    },
    **{"counted_once": "owned_rectangles", "travel": "comm_dtype", "wide": "accumulate_dtype"},
    **{"ends_in_turn": "staggered_end", "runs_ahead": "optimistic_step", "chained": "staggered_end"},
    **{"Regions": "CompiledOps", "regions": "ops", "Ran": "ActionTiming", "Pace": "StepTiming", "Mark": "ActionMarks"},
    **{"Facts": "RuleContext", "says": "message"},
    **{"_through_memory": "shared_memory_collective", "_survive": "raise_on_peer_loss"},
    **{"abandon": "exit_after_failure", "leave": "shutdown", "_speaks": "is_local_rank_0"},
    **{"all_or_none": "raise_on_all_ranks", "strange": "warning", "sound": "rollback_safe"},
    **{"ForwardContext": "ForwardState", "CachedContext": "CachedState"},
}


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that the code defines or uses, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value.lineno
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.rpartition(".")[2], node.lineno


def invented(source: str) -> list[str]:
    """The invented words among the identifiers of a source, each with its line and the word that belongs there."""
    return [
        f"line {line}: {name} → {INSTEAD[name]}" for name, line in identifiers(ast.parse(source)) if name in INSTEAD
    ]


@pytest.mark.parametrize("path", PROGRAM, ids=relative)
def test_no_invented_words(path: Path):
    assert invented(path.read_text()) == []


def test_invented_words_are_found_wherever_a_name_stands():
    source = "import x.strange\ndef leave(travel): return self.regions(sound=wide)\n'leave'\n# abandon\n"
    found = [line.split(": ")[1].split(" ")[0] for line in invented(source)]
    assert sorted(found) == ["leave", "regions", "sound", "strange", "travel", "wide"]
