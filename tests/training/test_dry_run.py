"""pretrain.py --dry_run as its users run it: on a laptop, for 16,384 ranks, without data."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megalite.commands import train
from megalite.config.rules import RULES
from megalite.config.sections.model import ModelConfig
from megalite.families.model_config import from_hf_config
from megalite.model.parameters import active_parameters, model_specs
from megalite.parallel.spec import parameter_count
from megalite.training import dry_run
from megalite.training import meta_device as meta

LLAMA_405B = {
    **{
        "model.preset": "llama-3-70b",
        "model.num_hidden_layers": 126,
        "model.hidden_size": 16384,
        "model.num_attention_heads": 128,
    },
    **{
        "model.intermediate_size": 53248,
        "tp": 8,
        "pp": 16,
        "parallel.sequence_parallel": "true",
        "train.precision": "bf16",
    },
    **{"data.sequence_length": 8192, "train.micro_batch_size": 1, "train.global_batch_size": 2048},
}


@pytest.fixture
def say(monkeypatch, capsys, tmp_path):
    """say(options, *words) → what pretrain.py --dry_run prints."""
    monkeypatch.chdir(tmp_path)

    def call(options: dict[str, Any], *words: str) -> str:
        given = [word for option, value in options.items() for word in (f"--{option}", str(value))]
        monkeypatch.setattr("sys.argv", ["pretrain.py", "--dry_run", *given, *words])
        train.main()
        return capsys.readouterr().out

    yield call
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


def test_a_dry_run_of_16384_ranks_builds_those_it_is_asked_for(say, monkeypatch):
    built, fake_process = [], meta.fake_process
    monkeypatch.setattr(
        meta, "fake_process", lambda rank, world: built.append((rank, world)) or fake_process(rank, world)
    )
    content = json.loads(say(LLAMA_405B, "--world_size", "16384", "--ranks", "0,9000,16383", "--json"))
    assert built == [(0, 16384), (9000, 16384), (16383, 16384)]
    assert content["parameters"] == 405_853_388_800  # as published
    assert [(rank["first_rank"], rank["ranks"]) for rank in content["ranks"]] == [(1024 * pp, 1024) for pp in range(16)]
    assert sum(rank["optimizer"] for rank in content["ranks"]) * 1024 == pytest.approx(
        12 * content["parameters"], rel=1e-3
    )
    assert content["flops_per_token"]["palm"]["model"] == pytest.approx(
        6 * content["parameters"] + 12 * 126 * 16384 * 8192, rel=0.01
    )


def test_it_prints_a_line_for_pipeline_ranks_that_are_alike(say):
    lines = say(
        {**LLAMA_405B, "train.recompute": "full", "pp": 4, "parallel.schedule": "gpipe"}, "--world_size", "128"
    ).splitlines()
    table = [line.split() for line in lines[3:7]]
    assert [row[:2] for row in table] == [["pp", "rank"], ["0", "0-31"], ["1-2", "32-95"], ["3", "96-127"]]
    assert lines[-1] == "built on the meta device with the planned number of bytes: 8 ranks"
    assert lines[-2] == f"length of the run: 100 steps, {100 * 2048 * 8192:,} tokens"


def test_the_table_has_the_copy_of_a_reference(say):
    options = {"model.preset": "tiny", "model.vocab_size": 100, "parallel.dp": 1}
    assert "teacher" not in say(options)
    lines = say({**options, "train.objective": "dpo"}).splitlines()
    header, row = lines[3].split(), lines[4].split()
    assert float(row[header.index("teacher") - 1]) > 0  # `pp rank` is one cell


@pytest.mark.parametrize(
    "options, words, message",
    [
        (
            {"model.vocab_size": "null"},
            [],
            "Could not determine model.vocab_size: found no PREFIX.json next to data.train. Set --model",
        ),
        ({"tp": 3}, ["--world_size", "3"], "parallel.tp = 3 does not divide"),
        ({}, ["--world_size", "12"], "parallel.dp = 1 does not fill the run's 12 processes"),
        ({"model.vocab_size": 100}, ["--ranks", "1"], "--ranks must be between 0 and 0 for a world of 1 ranks, got 1."),
        ({}, ["--world_size", "0"], "argument --world_size: '0' is not a positive integer"),
        ({}, ["--ranks", "x"], "'x' is not a list of ranks such as 0,7"),
        (
            {"parallel.zerro": 3},
            [],
            "--parallel.zerro on the command line is not a known option. Nearest: --parallel.zero.",
        ),
    ],
)
def test_a_wrong_dry_run_is_one_message(options, words, message, say, capsys):
    with pytest.raises(SystemExit) as end:
        say({"model.preset": "tiny", "model.vocab_size": 100, "parallel.dp": 1, **options}, *words)
    printed = capsys.readouterr().err
    assert end.value.code == 2 and message in printed and "Traceback" not in printed


def test_a_disagreement_is_one_message(say, monkeypatch, capsys):
    honest = meta.planned
    monkeypatch.setattr(meta, "planned", lambda *arguments: honest(*arguments)._replace(gradients=7))
    with pytest.raises(SystemExit) as end:
        say({"model.preset": "tiny", "model.vocab_size": 100, "pp": 2, "parallel.dp": 1}, "--ranks", "1")
    matches = re.fullmatch(
        r"rank 1: gradients takes [\d,]+ bytes as built, .* planned 7 bytes\.\n", capsys.readouterr().err
    )
    assert end.value.code == 1 and matches


@pytest.mark.parametrize("option, value", [("train.objective", "simpo"), ("data.packing", "true")])
def test_the_kind_of_data_that_is_elsewhere_is_not_judged(option, value, say):
    options = {"model.preset": "tiny", "model.vocab_size": 100, "parallel.dp": 1, "data.train": "elsewhere/pairs"}
    assert "built on the meta device" in say(options | {option: value})


def test_the_rules_that_it_leaves_out_exist():
    assert {rule.name for rule in RULES} >= dry_run.ABOUT_FILES


def test_the_published_sizes():
    """The language models as their papers and model cards count them."""
    for name, parameters in {
        **{
            "gpt2-124m": 124_439_808,
            "llama-3.2-1b": 1_235_814_400,
            "llama-3-8b": 8_030_261_248,
            "llama-3-70b": 70_553_706_496,
        },
        "tiny": 2 * 100 * 128 + 4 * (128 * (2 * 128 + 2 * 64) + 3 * 128 * 352 + 2 * 128) + 128,
    }.items():
        config = dry_run.read(
            ["--model.preset", name, *(["--model.vocab_size", "100"] if name == "tiny" else [])], None
        )
        assert parameter_count(model_specs(config.model)) == parameters, name


MIXTURES = {  # family, fields, the field of the number of experts, total parameters
    "Mixtral-8x7B": ("mixtral", {}, "num_local_experts", 46_702_792_704),
    "Mixtral-8x22B": (
        "mixtral",
        {
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "vocab_size": 32768,
        },
        "num_local_experts",
        140_630_071_296,
    ),
    "Qwen3-30B-A3B": ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}, "num_experts", 30_532_122_624),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        {
            **{
                "hidden_size": 4096,
                "moe_intermediate_size": 1536,
                "num_hidden_layers": 94,
                "num_attention_heads": 64,
                "head_dim": 128,
            },
            "intermediate_size": 12288,
        },
        "num_experts",
        235_093_634_560,
    ),
    "OLMoE-1B-7B": ("olmoe", {"intermediate_size": 1024}, "num_experts", 6_919_161_856),
    "Qwen2-57B-A14B": (
        "qwen2_moe",
        {
            **{
                "hidden_size": 3584,
                "moe_intermediate_size": 2560,
                "shared_expert_intermediate_size": 20480,
                "num_hidden_layers": 28,
            },
            **{"num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8},
            **{"intermediate_size": 18944, "vocab_size": 151936},
        },
        "num_experts",
        57_408_658_944,
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_sizes_of_mixtures_are_those_of_transformers(name):
    """Active: with as many experts as a token has, transformers counts all but the rows of the router for the
    others."""
    import torch
    import transformers

    def counted(**changes: int) -> int:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(family, **fields | changes)
            )
        return sum(each.numel() for each in model.parameters())

    family, fields, experts, total = MIXTURES[name]
    model = ModelConfig(**from_hf_config(transformers.AutoConfig.for_model(family, **fields).to_dict()))
    assert parameter_count(model_specs(model)) == counted() == total
    idle = (model.num_experts - model.num_experts_per_tok) * model.hidden_size * model.num_hidden_layers
    assert active_parameters(model) == counted(**{experts: model.num_experts_per_tok}) + idle


def test_deepseek_v3_fits_on_2048_gpus(say):
    """In DeepSeek's own layout, 16 stages and 64 expert-parallel ranks, 80 GB a GPU; memory is that of the most loaded
    rank."""
    layout = {"pp": 16, "parallel.ep": 64, "parallel.zero": 1, "train.recompute": "full"}
    layout |= {
        "data.sequence_length": 4096,
        "train.global_batch_size": 8192,
        "train.micro_batch_size": 1,
        "train.precision": "bf16",
    }
    content = json.loads(
        say({"model.preset": "deepseek-v3", **layout}, "--world_size", "2048", "--ranks", "0,2047", "--json")
    )
    assert content["parameters"] == 671_026_404_352
    assert max(rank["total"] for rank in content["ranks"]) < 80e9


def test_a_dry_run_of_an_elastic_run_has_the_layout_of_each_number_of_ranks(say):
    options = {
        **{"model.preset": "tiny", "model.vocab_size": 512, "tp": 2, "dp": 2, "parallel.min_ranks": 2},
        **{"train.global_batch_size": 8, "train.micro_batch_size": 1, "train.steps": 10},
    }
    largest = json.loads(say(options, "--json", "--device", "cpu"))
    assert largest["layouts"] == {"4": "tp 2 · pp 1 · dp 2", "3": "tp 2 · pp 1 · dp 1", "2": "tp 2 · pp 1 · dp 1"}
    fewer = json.loads(say(options, "--json", "--device", "cpu", "--world_size", "3"))
    assert (largest["world_size"], fewer["world_size"]) == (4, 2) and "layouts" not in fewer
    assert max(rank["optimizer"] for rank in fewer["ranks"]) > max(rank["optimizer"] for rank in largest["ranks"])
