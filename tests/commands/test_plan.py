"""tools/plan.py: the search against trying everything, plans that a run accepts, and the tool as its users run it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.assembly import parts as build
from megalite.commands import plan as planning
from megalite.commands.plan import main
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, load_config
from megalite.config.rules import check
from megalite.parallel.pipeline import send_recv_actions
from megalite.planner.budget.decision import decide_recomputation
from megalite.planner.hardware.constants import ALIKE, INTERVAL
from megalite.planner.hardware.devices import find_device
from megalite.planner.memory.estimate import estimate
from megalite.planner.search.best_first import Search
from megalite.planner.search.run_config import apply_layout
from megalite.planner.time.prediction import device_of_run, step_seconds
from megalite.planner.time.step import LayoutChoice, PlannedJob
from megalite.system.progress import Progress
from megalite.training import dry_run
from megalite.training.trainer import Trainer
from tests.support.configs import write_tokens

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    **{
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
    "max_position_embeddings": 64,
}
BATCH, SEQUENCE, GPUS = 8, 64, 4
ARGUMENTS = ["--gpus", 8, "--gpu", "h100", "--sequence_length", 8192, "--global_batch_size", 64]


@pytest.fixture
def tool(monkeypatch, capsys):
    """tool(*arguments) → what it prints."""

    def call(*arguments: object) -> str:
        main(list(map(str, arguments)))
        return capsys.readouterr().out

    return call


@pytest.fixture(autouse=True, scope="module")
def free_connections():
    """A connection's buffers are larger than all else of a small model, and would decide alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(send_recv_actions, "CONNECTION_BYTES", 0)
        yield


def small_search(
    wanted: int, model: dict[str, Any] | None = None, lora: dict[str, Any] | None = None, **fixed: int | str
) -> Search:
    """A small model on four devices that hold about half of its layouts."""
    base = from_dict(
        {
            "model": SMALL | (model or {}),
            "lora": lora or {},
            "data": {"sequence_length": SEQUENCE},
            "train": {"global_batch_size": BATCH, "precision": "bf16"},
        }
    )
    device = replace(find_device("a100"), memory=2.4e6 / 0.93, per_node=2)
    job = PlannedJob(base.model, device, SEQUENCE, BATCH, lora=base.lora if lora else None)
    return Search(job, base, GPUS, fixed, wanted)


@pytest.fixture(scope="module")
def everything(free_connections):
    """Every legal layout without offload and recomputation, timed and measured."""
    search = small_search(1, recompute="none", offload="none")
    return [search.plan(choice) for core in search.cores() for choice in search.variants(core)], search


# --- the search
# ------------------------------------------------------------------------------------------------------------------


def test_the_search_finds_what_trying_everything_finds(everything):
    plans, _ = everything
    best: dict[LayoutChoice, float] = {}
    for plan in plans:
        if plan.fits:
            family = replace(plan.choice, schedule="", virtual_stages=0)
            best[family] = min(best.get(family, float("inf")), plan.step.total)
    assert 0.2 * len(plans) < sum(plan.fits for plan in plans) < 0.9 * len(plans), "memory decides something"
    search = small_search(12, recompute="none", offload="none")
    ranked = search.plans()
    assert [plan.step.total for plan in ranked] == pytest.approx(sorted(best.values())[:12])
    assert search.considered == len(plans) and search.timed < len(plans)


def test_what_fits_a_run_accepts_and_holds_no_more(everything):
    plans, search = everything
    for plan in plans:
        assert search.bounds.memory(plan.choice) <= plan.memory.total * 1.02, plan.choice
        bound = search.bounds.time(plan.choice)
        assert search.bounds.alone(plan.choice) <= bound * (1 + 1e-9) and bound <= plan.step.total * (1 + 1e-9), (
            plan.choice
        )
        if plan.choice.pp == 1:
            assert bound == pytest.approx(plan.step.total), "nothing of such a step has to be simulated"
        if plan.fits:
            check(apply_layout(search.base, plan.choice), GPUS, leave_out=dry_run.ABOUT_FILES)
    for core in search.cores():
        variants = list(search.variants(core))
        assert search.bounds.roomy(variants, search.room) == [
            each for each in variants if search.bounds.memory(each) <= search.room
        ]
    for plan in plans[::17]:
        whole = max(rank.total for rank in estimate(apply_layout(search.base, plan.choice), GPUS))
        # else what is gathered does not matter any more
        counted = plan.choice.zero < 3 or plan.memory.total <= search.room
        assert plan.memory.total == whole if counted else plan.memory.total <= whole, (
            "following a few microbatches is following all"
        )


HYBRID = {
    "layer_blocks": ["mamba", "feed_forward", "delta+feed_forward", "attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_num_heads": 2, "mamba_head_dim": 16, "mamba_state_size": 8, "mamba_n_groups": 1},
}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_that_are_unlike_are_bounded_where_they_are(recompute):
    search = small_search(1, HYBRID, recompute=recompute, offload="none", micro_batch_size=2)
    cores = list(search.cores())
    assert {core.tp for core in cores} == {1, 2}, "mamba has two heads"
    for core in cores:
        plan = search.plan(core)
        bound = search.bounds.memory(plan.choice)
        assert bound <= plan.memory.total * 1.02, plan.choice


def test_a_run_is_predicted_as_its_plan_was(everything):
    plans, search = everything
    for plan in plans:
        config = apply_layout(search.base, plan.choice)
        assert step_seconds(config, search.job.device) == plan.step.total
    whole = step_seconds(config, search.job.device)
    config.lora.rank = 4
    assert step_seconds(config, search.job.device) < whole, "a frozen weight has no gradient"
    config.profiling.hardware = "h101"
    with pytest.raises(ConfigError, match="profiling.hardware = h101 is not in the hardware table.*Nearest: h100"):
        device_of_run(config, "")
    config.profiling.hardware = None
    predicted_device = device_of_run(config, "NVIDIA H200")
    assert predicted_device is not None and predicted_device.name == "h200" and device_of_run(config, "") is None


def test_the_search_within_a_budget_finds_what_trying_everything_finds():
    """Each layout with the best of what it may recompute. The bounds stay below what the decisions cost."""
    search = small_search(1, offload="none", pp=2, micro_batch_size=2, tp=1)
    ends = [
        search.plan(LayoutChoice(pp=2, dp=2, micro_batch_size=2, recompute=mode)).memory.total
        for mode in ("none", "full")
    ]
    search.room = sum(ends) / 2
    (best,) = search.plans()
    times, put_off = [], 0
    for variant in (variant for core in search.cores() for variant in search.variants(core)):
        config = apply_layout(search.base, variant)
        try:
            decision = decide_recomputation(config, int(search.room), GPUS, "cuda", search.job.device)
        except ConfigError:
            assert not search.plan(replace(variant, recompute="full")).fits
            continue
        plan, again = (
            search.plan(replace(variant, recompute=decision.recompute)),
            search.bounds.recomputation(variant, search.room),
        )
        assert all(seconds <= decision.ranks[rank].seconds * (1 + 1e-9) + 1e-12 for rank, seconds in again.items())
        assert search.bounds.time(variant, again) <= plan.step.total * (1 + 1e-9)
        put_off += any(seconds > 0 for seconds in again.values())
        times += [plan.step.total] if plan.fits else []
    assert best.step.total == pytest.approx(min(times)) and put_off > 0


def test_offload_is_taken_where_nothing_else_fits():
    search = small_search(5, pp=1, tp=1, micro_batch_size=1, recompute="full")
    search.room = (
        min(search.plan(choice).memory.total for core in search.cores() for choice in search.variants(core)) + 1
    )
    assert {plan.choice.offload for plan in search.plans()} == {"cpu", "disk"}


# --- the tool
# --------------------------------------------------------------------------------------------------------------------


def test_json_has_what_is_promised(tool, tmp_path):
    written = tmp_path / "run.yaml"
    arguments = (
        "--model",
        "llama-3-8b",
        *ARGUMENTS,
        "--tokens",
        1e12,
        "--price_per_hour",
        2,
        "--plans",
        2,
        "--write",
        written,
    )
    content = json.loads(tool(*arguments, "--json"))
    assert content["parameters"] == 8_030_261_248 and len(content["plans"]) == 2 and len(content["explanation"]) >= 4
    keys = (
        "tp pp virtual_stages schedule dp zero micro_batch_size recompute memory_bytes step_time_s "
        "tokens_per_second_per_gpu mfu fits"
    )
    for plan in content["plans"]:
        assert set(keys.split()) <= plan.keys() and plan["fits"] and plan["tp"] * plan["pp"] * plan["dp"] == 8
        assert sum(plan["step_time_parts_s"].values()) == pytest.approx(plan["step_time_s"])
        assert plan["tokens_per_second_per_gpu"] == pytest.approx(64 * 8192 / 8 / plan["step_time_s"])
        assert 0.3 < plan["mfu_causal"] < plan["mfu_palm"] == plan["mfu"] < 0.75
        assert plan["days"] == pytest.approx(1e12 / (64 * 8192) * plan["step_time_s"] / 86400)
        assert plan["cost"] == pytest.approx(plan["days"] * 24 * 2 * 8)
        low, high = plan["step_time_interval_s"]
        assert low * (1 + INTERVAL) == pytest.approx(plan["step_time_s"]) == high / (1 + INTERVAL)
    best = content["plans"][0]
    planned = dry_run.read(["--config", str(written)], 8)
    assert (planned.parallel.tp, planned.parallel.pp, planned.parallel.zero) == (best["tp"], best["pp"], best["zero"])
    assert max(rank.total for rank in estimate(planned, 8)) == best["memory_bytes"]
    assert step_seconds(planned, device_of_run(planned, "")) == pytest.approx(best["step_time_s"]), (
        "the run's last line is about this plan"
    )


def test_plans_that_cannot_be_told_apart_are_named(tool):
    content = json.loads(tool("--model", "llama-3-8b", *ARGUMENTS, "--plans", 4, "--json"))
    times = [plan["step_time_s"] for plan in content["plans"]]
    alike = sum(time < times[0] * (1 + ALIKE) for time in times)
    (sure,) = (
        line for line in content["explanation"] if line.startswith(f"80 % of published runs are within {INTERVAL:.0%}")
    )
    assert alike > 1 and any(f"first {alike} plans cannot be told apart" in line for line in content["explanation"])
    unknown = json.loads(tool("--model", "llama-3.2-1b", *ARGUMENTS, "--gpu", "l40s", "--plans", 1, "--json"))
    assert unknown["plans"][0]["step_time_interval_s"] is None
    assert "No published run on l40s has been compared with a prediction." in unknown["explanation"]


@pytest.mark.parametrize(
    "after, count", [("searching", 0), ("a plan", 2)], ids=["before the first plan", "after two plans"]
)
def test_an_interrupted_search_prints_the_plans_that_it_has(after, count, tool, monkeypatch, capsys):
    """They are the fastest, and --json stays one valid object that says that others are required."""
    arguments = ("--model", "llama-3-8b", *ARGUMENTS, "--pp", 1, "--offload", "none")
    whole = json.loads(tool(*arguments, "--plans", 4, "--json"))
    assert whole["complete"] is True

    def interrupting(self, what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        if what == "searching" and done == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", interrupting)
    for form in (["--json"], []):
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments), "--plans", "4", *form])
        assert end.value.code == 130
        out = capsys.readouterr().out
        if form:
            content = json.loads(out)
            assert content["complete"] is False and content["plans"] == whole["plans"][:count]
        assert "Search interrupted" in out


def test_a_search_tells_how_far_it_is():
    reports: list[tuple[str, int, int | None]] = []
    search = small_search(3)
    search.progress = lambda what, done=0, total=None, unit="": reports.append((what, done, total))
    assert len(search.plans()) == 3
    assert {what for what, _, _ in reports} == {"listing the legal layouts", "searching"}
    assert [(done, total) for what, done, total in reports if what == "listing the legal layouts"] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert {done for what, done, total in reports if what == "searching" and total == 3} == {0, 1, 2}


def test_adapters_are_planned(tool, tmp_path):
    """Frozen weights have no gradients: less is kept and computed, but as much is passed through."""
    own = tmp_path / "adapters.yaml"
    own.write_text("model:\n  preset: llama-3.2-1b\nlora:\n  rank: 16\n")
    fixed = [
        *ARGUMENTS,
        "--tp",
        1,
        "--pp",
        1,
        "--micro_batch_size",
        1,
        "--recompute",
        "none",
        "--zero",
        1,
        "--offload",
        "none",
        "--json",
    ]
    ((full,), (frozen,)) = (json.loads(tool("--model", model, *fixed))["plans"] for model in ("llama-3.2-1b", own))
    assert 0.6 * full["step_time_s"] < frozen["step_time_s"] < full["step_time_s"]
    assert frozen["memory"]["optimizer"] < 0.05 * full["memory"]["optimizer"]
    base = ("--lora_base", "nf4", "--lora_double_quant")
    ((quantized,),) = (json.loads(tool("--model", own, *fixed, *base))["plans"],)
    assert quantized["memory"]["parameters"] < 0.6 * frozen["memory"]["parameters"], "the embedding stays"
    assert quantized["step_time_interval_s"] is None, "no such run has been compared"


@pytest.mark.parametrize("base", ["nf4", "int8", "mxfp4"])
def test_a_quantized_base_is_bounded_by_what_it_needs(base):
    """A layout is not given up for a bound that a quantized base does not reach."""
    lora = {"rank": 4, "base": base}
    search = small_search(1, {"num_hidden_layers": 8}, lora, recompute="none", offload="none", micro_batch_size=1)
    plans = [search.plan(choice) for core in search.cores() for choice in search.variants(core)]
    assert all(search.bounds.memory(plan.choice) <= plan.memory.total * 1.02 for plan in plans)
    assert any(plan.choice.zero == 3 for plan in plans) and any(plan.choice.tp == 4 for plan in plans)


def test_fp8_is_planned_and_its_effect_is_said(tool):
    fixed = ("--tp", 1, "--pp", 1, "--micro_batch_size", 1, "--recompute", "none", "--zero", 1, "--offload", "none")
    plain, fp8 = (
        json.loads(tool("--model", "llama-3.2-1b", *ARGUMENTS, *fixed, "--fp8", name, "--json"))
        for name in ("none", "block")
    )
    ((before,), (after,)) = plain["plans"], fp8["plans"]
    assert after["step_time_s"] < before["step_time_s"] and after["step_time_interval_s"] is None
    (line,) = [line for line in fp8["explanation"] if line.startswith("fp8 (block): ")]
    assert f"{after['step_time_s']:.4g} s per step, {before['step_time_s']:.4g} s in bf16" in line


def test_choices_that_are_fixed_stay(tool):
    fixed = ("--tp", 2, "--pp", 2, "--schedule", "zb-v", "--zero", 2, "--micro_batch_size", 1, "--recompute", "full")
    (plan,) = json.loads(tool("--model", "llama-3-8b", *ARGUMENTS, *fixed, "--offload", "none", "--json"))["plans"]
    assert [plan[name] for name in ("tp", "pp", "dp", "schedule", "virtual_stages", "zero", "recompute")] == [
        2,
        2,
        2,
        "zb-v",
        2,
        2,
        "full",
    ]


def test_shards_stay_inside_a_node_where_asked(tool, tmp_path):
    """Of two nodes: ZeRO-3 within each, the same shards on both."""
    fixed = (
        "--zero",
        3,
        "--tp",
        1,
        "--pp",
        1,
        "--micro_batch_size",
        1,
        "--recompute",
        "none",
        "--offload",
        "none",
        "--cp",
        1,
    )
    arguments = ("--model", "llama-3.2-1b", *ARGUMENTS, "--gpus", 16, *fixed, "--plans", 2)
    both = json.loads(tool(*arguments, "--json"))["plans"]
    assert {plan["dp_shard"] for plan in both} == {None, 8}
    (plan,) = json.loads(tool(*arguments, "--dp_shard", 8, "--write", tmp_path / "run.yaml", "--json"))["plans"]
    assert plan["dp_shard"] == 8 and plan["step_time_s"] == next(
        each["step_time_s"] for each in both if each["dp_shard"] == 8
    )
    assert dry_run.read(["--config", str(tmp_path / "run.yaml")], 16).parallel.dp_shard == 8
    assert "ZeRO-3 within 8" in tool(*arguments, "--dp_shard", 8)
    plans = json.loads(
        tool("--model", "llama-3.2-1b", *ARGUMENTS, "--gpus", 16, "--dp_shard", 8, "--plans", 3, "--json")
    )["plans"]
    assert {plan["dp_shard"] for plan in plans} == {8}, "layouts with fewer data ranks have no such plan"


def test_stages_of_a_rank_that_are_fixed_rule_out_other_schedules(tool):
    fixed = ("--virtual_stages", 4, "--offload", "none", "--recompute", "none", "--plans", 3)
    plans = json.loads(tool("--model", "llama-3-8b", *ARGUMENTS, *fixed, "--json"))["plans"]
    assert plans and all(
        plan["virtual_stages"] == 4 and plan["schedule"] == "interleaved" and plan["pp"] > 1 for plan in plans
    )


def test_tensor_parallel_groups_stay_inside_nodes_unless_they_are_fixed():
    base = from_dict(
        {
            "model": SMALL | {"num_attention_heads": 12, "hidden_size": 96, "intermediate_size": 144},
            "data": {"sequence_length": 48},
        }
    )
    job = PlannedJob(base.model, replace(find_device("a100"), per_node=4), 48, 24)
    base.train.global_batch_size = 24

    def sizes(gpus: int, **fixed: int | str) -> set[int]:
        return {core.tp for core in Search(job, base, gpus, fixed).cores()}

    assert sizes(12) == {1, 2, 4, 12} and sizes(3) == {1, 3} and sizes(12, tp=3) == {3}


def test_the_written_command_starts_as_many_ranks_as_were_planned(tool, tmp_path):
    sizes = ("--gpus", 12, "--gpu", "h100", "--sequence_length", 1024, "--global_batch_size", 12, "--plans", 1)
    tool("--model", "llama-3.2-1b", *sizes, "--write", tmp_path / "run.yaml")
    (command,) = (line for line in (tmp_path / "run.yaml").read_text().splitlines() if "torchrun" in line)
    assert "--nnodes 2 " in command and "--nproc-per-node 6 " in command


def test_text_says_why_and_walks_from_one_gpu_to_offload(tool):
    text = tool("--model", "llama-3-8b", *ARGUMENTS, "--plans", 3, "--explain", "--recompute", "none")
    assert "Fastest: " in text and "Its fullest rank takes" in text and " slower" in text
    rungs = [line.partition(":")[0] for line in text.splitlines()[-11:]]
    assert [
        name
        for name in ("one GPU", "replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3", "recomputation", "tensor", "offload")
        if name in rungs
    ] == [*("one GPU", "replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3", "recomputation", "tensor", "offload")]
    (replicas,) = (line for line in text.splitlines() if line.startswith("replicas"))
    assert "does not fit into 80.0 GiB" in replicas


def test_a_written_plan_trains(tool, tmp_path):
    """The way of a small model: its shape in a file, a plan for one process, and steps with the configuration that
    comes out."""
    shape, plan = tmp_path / "shape.yaml", tmp_path / "plan.yaml"
    lines = "".join(f"  {key}: {value}\n" for key, value in SMALL.items())
    shape.write_text(f"model:\n{lines}train:\n  steps: 2\noptimizer:\n  lr: 0.01\n")
    sizes = ("--sequence_length", SEQUENCE, "--global_batch_size", BATCH, "--precision", "fp32")
    tool("--model", shape, "--gpus", 1, "--gpu", "a100", *sizes, "--recompute", "full", "--write", plan)
    data = ["--data.train", write_tokens(tmp_path, SMALL["vocab_size"]), "--run.dir", str(tmp_path / "runs")]
    config = load_config(["--config", str(plan), *data], world_size=1)
    assert (config.optimizer.lr, config.train.recompute, config.train.precision) == (0.01, "full", "fp32")
    trainer = Trainer(config, build.make_mesh(config), "cpu")
    losses = [trainer.step().loss for _ in range(2)]
    trainer.close()
    assert losses[1] < losses[0] < 7


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--model, --gpus, --gpu, --sequence_length, --global_batch_size are required."),
        (
            ["--model", "llama-3-8b", "--gpus", "8", "--gpu", "h100", "--sequence_length", "8192"],
            "--global_batch_size is required.",
        ),
        (["--model", "lama-3-8b"], "--model lama-3-8b is not a known model."),
        (["--model", "llama-3-8b", *ARGUMENTS, "--gpu", "h10"], "--gpu h10 is not in the hardware table"),
        (["--model", "llama-3-8b", *ARGUMENTS, "--tp", "3"], "No layout is legal: parallel.tp = 3 does not divide"),
        (
            ["--model", "llama-3-8b", *ARGUMENTS, "--dp_shard", "3"],
            "No layout is legal: parallel.dp_shard = 3 does not divide",
        ),
        (
            ["--model", "llama-3-8b", *ARGUMENTS, "--dp_shard", "4", "--zero", "0"],
            "parallel.dp_shard = 4 has no effect",
        ),
        (["--model", "llama-3-8b", *ARGUMENTS, "--sequence_length", "9000"], "data.sequence_length = 9000 exceeds"),
        (["--model", "llama-3-8b", *ARGUMENTS, "--sequence_length", "131072"], "or take the preset llama-3.1-8b."),
        (
            ["--model", "llama-3-8b", *ARGUMENTS, "--gpu", "v100-32gb", "--precision", "bf16"],
            "--precision bf16 has no peak on v100-32gb",
        ),
        (
            ["--model", "nowhere.json", *ARGUMENTS],
            "--model nowhere.json cannot be read: No such file or directory. Pass the config.json",
        ),
        (["--model", "tiny", *ARGUMENTS], "--model tiny takes the vocabulary size from the data"),
        (["--model", "llama-3-70b", *ARGUMENTS, "--gpu", "rtx-4090", "--gpus", "1"], "Nothing fits: even one device"),
        (
            ["--model", "llama-3-70b", *ARGUMENTS, "--gpus", "4", "--offload", "cpu"],
            "Nothing fits: tp4, ZeRO-3, micro-batches of 1",
        ),
        (
            ["--model", "llama-3-8b", *ARGUMENTS, "--recompute", "every-x"],
            "train.recompute = every-x is not a recomputation mode.",
        ),
        (
            ["--model", "llama-3-8b", *ARGUMENTS, "--schedule", "1f1b", "--virtual_stages", "2"],
            "parallel.virtual_stages = 2 does not match",
        ),
        (["--model", "llama-3-8b", *ARGUMENTS, "--virtual_stages", "64"], "parallel.pp = 2 makes 128 stages under"),
        (
            ["--model", "llama-3-8b", *ARGUMENTS, "--pp", "1", "--virtual_stages", "2"],
            "no sizes go with pp = 1, virtual_stages = 2. Fix less",
        ),
        (
            ["--model", "llama-3-8b", *ARGUMENTS, "--write", "nowhere/run.yaml"],
            "the directory nowhere does not exist. Create it first.",
        ),
        (["--model", "llama-3-8b", *ARGUMENTS, "--gpus", "0"], "argument --gpus: '0' is not a positive integer"),
    ],
)
def test_what_can_not_be_planned_is_one_message(tool, capsys, arguments, message):
    try:
        out = tool(*arguments)
    except SystemExit as error:
        streams = capsys.readouterr()
        out = streams.out + streams.err
        assert error.code == (1 if message.startswith("Nothing") else 2)
    assert message in out and "Traceback" not in out


@pytest.mark.parametrize("text, message", [("[a, b]", "is not a set of sections"), ("train: 5", "train = 5 in")])
def test_a_file_that_is_no_configuration_is_one_message(tool, capsys, tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit):
        tool("--model", tmp_path / "run.yaml", *ARGUMENTS)
    assert message in capsys.readouterr().err


def test_the_layout_of_a_configuration_is_replaced(tool, tmp_path):
    layout = "parallel: {tp: 4, pp: 2, schedule: interleaved, virtual_stages: 2}"
    (tmp_path / "run.yaml").write_text(
        f"model: {{preset: gpt2-124m, vocab_size: 512}}\ntrain: {{precision: bf16}}\n{layout}"
    )
    words = ["--gpus", 1, "--gpu", "h100", "--sequence_length", 512, "--global_batch_size", 8, "--plans", 1, "--json"]
    assert json.loads(tool("--model", tmp_path / "run.yaml", *words))["plans"]


def test_the_length_of_a_run_is_that_of_the_planned_batch(tmp_path):
    """In tokens, and with a warm-up that is a share of it: 10^6 / (64 · 128) steps."""
    (tmp_path / "run.yaml").write_text(
        "model: {preset: tiny, vocab_size: 257}\ntrain: {tokens: 1M}\noptimizer: {warmup_steps: 5%}"
    )
    words = [
        "--model",
        str(tmp_path / "run.yaml"),
        "--gpu",
        "h100",
        "--sequence_length",
        "128",
        "--global_batch_size",
        "64",
    ]
    words += ["--tokens", "300B"]
    options = planning.parser().parse_args(words)
    config = planning.base_config(options)
    assert (config.train.steps, config.train.tokens, config.optimizer.warmup_steps, options.tokens) == (
        123,
        None,
        7,
        300 * 10**9,
    )
