"""Which fields of a config.json are read, ignored and rejected, beside what transformers' modeling and configuration
files read."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import ConfigError
from megalite.config.sections.model import ModelConfig
from megalite.families.model_config import Family, families, from_hf_config, unread_fields
from megalite.huggingface.config_json import meaning
from tests.families.published import ACCEPTED, GROUPED, REJECTED

TRANSFORMERS = Path(str(importlib.util.find_spec("transformers").origin)).parent  # type: ignore[union-attr]
SHARED = ("modeling_rope_utils.py", "masking_utils.py", "cache_utils.py", "generation/continuous_batching/utils.py")
"""Files that read the configuration of every family in a forward pass."""
OTHER_HEADS = (
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "DoubleHeads",
    "SequenceSummary",
    "Conditional",
    "Projector",
    "Vision",
)
SHAPE = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
SHAPE += ["max_position_embeddings", "layer_types"]
ROPE = ["rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"]
NO_FIELD = [
    "get_text_config",
    "standardize_rope_params",
    "validate_rope",
    "validate_layer_type",
    "default_theta",
    "_is_quantized",
    "number_of_conv_states",
]
"""Methods and class attributes; the number of states of a convolution, which no family has."""


def is_config(node: ast.expr) -> bool:
    named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return named == "config" or named.endswith("_config")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def reads(nodes: list[ast.AST], owner: Any) -> set[str]:
    """The attributes that code reads from an object, with `.` or getattr."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and owner(node.value):
            names.add(node.attr)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and owner(node.args[0])
        ):
            names |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
    return names


def parsed(path: Path) -> list[ast.AST]:
    """The nodes of a file, without classes that are not part of a causal language model."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        each
        for each in tree.body
        if not (isinstance(each, ast.ClassDef) and any(head in each.name for head in OTHER_HEADS))
    ]
    return list(ast.walk(tree))


def keywords(nodes: list[ast.AST]) -> set[str]:
    """The fields that a configuration class takes from kwargs."""
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop")
    ]
    ours = [call for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == "kwargs"]  # type: ignore[attr-defined]
    return {call.args[0].value for call in ours if isinstance(call.args[0], ast.Constant)}


def files_of(family: Family) -> tuple[list[ast.AST], list[ast.AST]]:
    own = (TRANSFORMERS / "models" / family.model_type).is_dir()
    folder = family.model_type if own else str(family.multimodal)
    place = TRANSFORMERS / "models" / folder
    nodes = parsed(place / f"configuration_{folder}.py")
    if not own:
        nodes = [
            node for each in nodes if isinstance(each, ast.ClassDef) and "Text" in each.name for node in ast.walk(each)
        ]
    return parsed(place / f"modeling_{folder}.py"), nodes


@functools.cache
def read_by(name: str) -> frozenset[str]:
    """The fields that transformers reads in a family's causal language model."""
    modeling, configuration = files_of(families().rows[name])
    shared = set().union(*(reads(parsed(TRANSFORMERS / file), is_config) for file in SHARED))
    own = reads(modeling, is_config) | reads(configuration, is_self) | keywords(configuration)
    methods = {node.name for node in configuration if isinstance(node, ast.FunctionDef)}
    return frozenset((own | shared) - {*NO_FIELD} - methods)


@pytest.mark.parametrize("name", families().rows)
def test_every_field_that_transformers_reads_is_handled_or_rejected(name: str):
    known, family = families(), families().rows[name]
    computed = {"head_dim"} if family.model_type == "falcon" else set()
    handled = {
        *family.fields,
        *family.own.split(),
        *family.aliases,
        *known.window_fields[family.window],
        *known.ignored,
        *SHAPE,
        *computed,
    }
    handled |= {*ROPE, "_sliding_window_pattern"} if family.rope else {"rope_parameters"}
    aliased = {*family.aliases.values()}
    missing = read_by(name) - handled - aliased - known.only - {*family.only.split()}
    assert not missing - {
        "text_config",
        "vision_config",
        "image_token_id",
        "mm_tokens_per_image",
        "image_size",
        "patch_size",
        "video_token_id",
        "spatial_merge_size",
    }, missing
    needless = {*family.only.split()} - read_by(name)
    assert not needless, f"transformers does not read {needless}"


def test_fields_that_all_families_share_are_read_by_transformers():
    everywhere = set()
    for file in (*SHARED, "modeling_utils.py", "modeling_layers.py", "configuration_utils.py"):
        nodes = parsed(TRANSFORMERS / file)
        everywhere |= reads(nodes, is_config) | keywords(nodes)
        everywhere |= {
            node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        everywhere |= {
            node.left.value for node in nodes if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant)
        }
    assert families().only <= everywhere


@pytest.mark.parametrize("name", families().rows)
def test_other_names_are_those_of_transformers(name: str):
    _, nodes = files_of(families().rows[name])
    maps = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "attribute_map"
    ]
    theirs = {frozenset(pair) for each in maps for pair in ast.literal_eval(each).items()} - {
        frozenset(("num_mtp_layers", "num_nextn_predict_layers"))
    }
    theirs |= {frozenset(("n_embed", "hidden_size"))} if name == "falcon" else set()
    theirs |= {frozenset(("tie_embedding", "tie_word_embeddings"))} if name in ("lfm2", "lfm2_moe") else set()
    theirs |= {frozenset(("block_ff_dim", "intermediate_size"))} if name == "lfm2" else set()
    theirs |= {frozenset(("num_experts", "n_routed_experts"))} if name in ("deepseek_v32", "glm_moe_dsa") else set()
    assert {frozenset(pair) for pair in families().rows[name].aliases.items()} == theirs


@pytest.mark.parametrize("origin, file, ignored", ACCEPTED, ids=[row[0] for row in ACCEPTED])
def test_published_files_are_read_as_transformers_reads_them(origin: str, file: dict[str, Any], ignored: list[str]):
    import transformers

    shape = from_hf_config(file)
    assert list(unread_fields(file)) == ignored
    theirs = transformers.CONFIG_MAPPING[file["model_type"]].from_dict(json.loads(json.dumps(file)))
    again = from_hf_config(json.loads(theirs.to_json_string(use_diff=False)))
    assert meaning(ModelConfig(**again)) == meaning(ModelConfig(**shape))


@pytest.mark.parametrize("change, says", REJECTED, ids=[row[1][:40] for row in REJECTED])
def test_what_transformers_reads_and_we_do_not_compute_is_rejected(change: dict[str, Any], says: str):
    sizes = {
        key: value
        for key, value in GROUPED.items()
        if key != "num_key_value_heads" or change.get("model_type") != "gpt_neox"
    }
    with pytest.raises(ConfigError) as rejected:
        from_hf_config({"model_type": "llama"} | sizes | change)
    assert says in str(rejected.value)
