"""megalite plan --from FILE: every importer's files, changes that lead to what is promised, and what is not known."""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import held_out
from megalite.commands import imported_plan
from megalite.commands.import_config import as_yaml
from megalite.commands.plan import main, parser
from megalite.config.errors import ConfigError
from megalite.importers.convert import convert
from megalite.importers.write_back import WriteBack
from megalite.planner.plans import LayoutChoice, published_errors
from tests.importers.test_real_files import FOLDER, REAL

MEGATRON = {
    **{"nproc-per-node": 4, "num-layers": 4, "hidden-size": 1024, "ffn-hidden-size": 4096, "num-attention-heads": 16},
    **{"seq-length": 1024, "max-position-embeddings": 1024, "vocab-size": 32000, "micro-batch-size": 1},
    **{"global-batch-size": 16, "tensor-model-parallel-size": 4, "bf16": None, "swiglu": None, "seed": 7},
    **{"normalization": "RMSNorm", "disable-bias-linear": None, "position-embedding-type": "rope"},
    **{"use-distributed-optimizer": None, "untie-embeddings-and-output-weights": None, "train-iters": 100},
}
OPEN = ["--sequence_length", 2048, "--global_batch_size", 48, "--vocab_size", 32000, "--micro_batch_size", 1]
WITH_SIZES = ("torchtitan/", "megatron/")
"""Projects whose files have the sizes of the model; those of others are elsewhere."""
REJECTED = {"accelerate/float8.yaml", *(f"megatron/{name}" for name in ("nemo.yaml", "neox.yml", "other_trainer.sh"))}
FILES = {*REAL, *(f"megatron/{path.name}" for path in (FOLDER / "megatron").iterdir() if path.is_file())} - REJECTED
ELSEWHERE = {"llama-factory/kto.yaml", "torchtune/distillation.yaml"}  # they name a second model


def command(arguments: dict[str, Any]) -> str:
    launcher = f"torchrun --nproc-per-node {arguments['nproc-per-node']} pretrain_gpt.py"
    given = [(name, value) for name, value in arguments.items() if name != "nproc-per-node"]
    return " ".join([launcher, *(f"--{name}" if value is None else f"--{name} {value}" for name, value in given)])


def parsed(*words: object) -> Namespace:
    return parser().parse_args(["--gpu", "h100", *map(str, words)])


def plan_of(*words: object):
    options = parsed("--from", *words)
    return imported_plan.layout_of_file(imported_plan.read_source(options), options)


@pytest.mark.parametrize("name", sorted(FILES - ELSEWHERE))
def test_every_file_of_an_importer_is_planned(name: str):
    """Its layout on the GPUs that it is for, or on 8; a rule that it breaks is named."""
    words: list[object] = [FOLDER / name, *OPEN]
    words += [] if name.startswith(WITH_SIZES) and "sizes_by" not in name else ["--model", "llama-3.2-1b"]
    if name in REAL and (project := REAL[name].project):
        words += ["--project", project]
    try:
        search, choice, own, broken = plan_of(*words)
    except ConfigError as error:
        assert "Pass --gpus N." in str(error)
        search, choice, own, broken = plan_of(*words, "--gpus", 8)
        assert choice.gpus == 8
    assert (own is None) == (broken is not None)
    if own is not None:
        assert own.memory.total > 0 and own.step.total > 0
        assert "published run" in published_errors.describe_error(search.job, choice)[1]
    else:
        assert broken is not None and broken.startswith(("parallel.", "train.", "data.", "model.", "lora."))


def test_a_plan_is_that_of_the_imported_configuration(tmp_path, capsys):
    """As megalite plan finds it for the options that megalite import-config writes, with the layout fixed."""
    _, choice, own, _ = plan_of(command(MEGATRON))
    tree = {name: True if value is None else value for name, value in MEGATRON.items()}
    (tmp_path / "imported.yaml").write_text(as_yaml(convert(tree, None, None, "megatron")))
    words = ["--model", tmp_path / "imported.yaml", "--gpus", 4, "--gpu", "h100", "--json", "--plans", 1]
    fixed = {"sequence_length": 1024, "global_batch_size": 16, "tp": 4, "pp": 1, "dp": 1, "cp": 1, "zero": 1}
    fixed |= {"micro_batch_size": 1, "recompute": "none", "offload": "none"}
    main([*map(str, words), *(f"--{name}={value}" for name, value in fixed.items())])
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert own is not None and (choice.tp, choice.sequence_parallel) == (4, False)
    assert plan["sequence_parallel"] and plan["memory"]["parameters"] == own.memory.parameters
    assert plan["step_time_s"] == pytest.approx(own.step.total, rel=0.1)  # which has sequence parallelism
    search, *_ = plan_of(command(MEGATRON | {"sequence-parallel": None}))
    (same,) = (search.plan(each) for each in [replace(choice, sequence_parallel=True)])
    assert (plan["step_time_s"], plan["memory_bytes"]) == (same.step.total, same.memory.total)


def test_the_changes_of_a_file_lead_to_the_layout_that_is_promised(capsys):
    main(["--from", command(MEGATRON), "--gpu", "h100", "--plans", "2", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["fits"] and content["gpus"] == 4 and content["project"] == "megatron" and content["complete"]
    proposals = [plan for plan in content["plans"] if plan["in_file"] is not None and not plan["without_key"]]
    assert len(proposals) >= 2
    times = [content["layout"]["step_time_s"]]
    for plan in proposals:
        changed = dict(MEGATRON)
        for key, value in plan["in_file"].items():
            changed |= {key: None if value is True else value}
            if value is None:
                del changed[key]
        assert changed != MEGATRON
        search, choice, own, broken = plan_of(command(changed))
        assert broken is None and own is not None and own.fits
        assert {"tp": choice.tp, "pp": choice.pp, "dp": choice.dp, "zero": choice.zero} == {
            axis: plan[axis] for axis in ("tp", "pp", "dp", "zero")
        }
        assert own.step.total == pytest.approx(plan["step_time_s"], rel=1e-9)
        assert own.step.total < times[0] and search.job.global_batch_size == 16


def test_a_layout_that_does_not_fit_is_said_with_those_that_do(capsys):
    arguments = MEGATRON | {"num-layers": 80, "hidden-size": 4096, "ffn-hidden-size": 16384, "num-attention-heads": 32}
    main(["--from", command(arguments | {"recompute-activations": None}), "--gpu", "h100", "--plans", "1"])
    printed = capsys.readouterr().out
    assert "It does not fit: the fullest rank takes" in printed and "optimizer state" in printed
    assert "Layouts that fit, those with the fewest changes first:" in printed
    assert "   in the file: " in printed and "   megalite: " in printed
    assert "Of this kind (dense models, H100) 126 published runs are compared: median error" in printed
    assert "MFU" in printed


def keys_for(name: str, gpus: int, wanted: dict[str, Any]) -> dict[str, Any]:
    source = imported_plan.read_source(parsed("--from", FOLDER / name, "--gpus", gpus))
    back = WriteBack(source.tree, source.convert, source.project, source.dp).changes(wanted)
    assert not back.unexpressed
    return back.keys


@pytest.mark.parametrize(
    "name, gpus, wanted, keys",
    [
        (
            *("torchtitan/llama-70b-long.toml", 256),
            {"parallel.tp": 2, "parallel.dp": 8, "parallel.dp_shard": 32},
            {"parallelism.tensor_parallel_degree": 2, "parallelism.data_parallel_replicate_degree": 4},
        ),
        (
            *("axolotl/lora-8b.yml", 4, {"train.micro_batch_size": 6, "train.global_batch_size": 3 * 2 * 4}),
            {"micro_batch_size": 6, "gradient_accumulation_steps": 1},
        ),
        ("llama-factory/full-sft-zero3.yaml", 64, {"train.micro_batch_size": 8}, {"per_device_train_batch_size": 8}),
        ("deepspeed/pipeline.json", 32, {"parallel.zero": 2}, {"zero_optimization.stage": 2}),
        (
            *("accelerate/megatron-plugin.yaml", 16, {"parallel.tp": 4, "parallel.dp": 2}),
            {"megatron_lm_config.megatron_lm_tp_degree": 4},
        ),
        ("torchtune/full-8b.yaml", 8, {"parallel.tp": 2, "parallel.dp": 4}, {"tensor_parallel_dim": 2}),
    ],
)
def test_a_layout_is_written_in_the_keys_of_the_project(name, gpus, wanted, keys):
    assert keys_for(name, gpus, wanted) == keys


def test_what_no_key_expresses_is_said():
    source = imported_plan.read_source(parsed("--from", FOLDER / "axolotl/lora-8b.yml", "--gpus", 8))
    back = WriteBack(source.tree, source.convert, source.project, 8).changes({"parallel.pp": 2})
    assert back.keys == {} and back.unexpressed == ["parallel.pp"]


def test_keys_that_are_not_honoured_have_a_consequence():
    unknown = {"something-new": 3, "lr-decay-style": "polynomial", "recompute-granularity": "full"}
    text = command(MEGATRON | unknown | {"recompute-method": "uniform", "recompute-num-layers": 3})
    options = parsed("--from", text)
    source = imported_plan.read_source(options)
    base = imported_plan.layout_of_file(source, options)[0].base
    said = {remark.key: text for remark, text in imported_plan.consequences(source.imported, base)}
    assert said["something-new"].startswith("The plan is without it")
    assert said["lr-decay-style"] == "The plan does not depend on it."


@pytest.mark.parametrize(
    "words, message",
    [
        (["missing.toml"], "FILE = missing.toml cannot be read: No such file"),
        ([FOLDER / "axolotl/lora-8b.yml"], "does not say how many GPUs it is for. Pass --gpus N."),
        ([FOLDER / "axolotl/lora-8b.yml", "--gpus", 8], "model.from_hf = example/llama-3-8b-mirror is neither"),
        ([FOLDER / "deepspeed/pipeline.json", "--gpus", 8], "Pass --model NAME, its model and --sequence_length S"),
        ([FOLDER / "megatron/grid.sh"], "takes the vocabulary size from the data. Pass --vocab_size V."),
        ([FOLDER / "megatron/nemo.yaml"], "Configurations of NeMo are not supported."),
        ([FOLDER / "megatron/other_trainer.sh"], "Pass the project as --project"),
        ([command(MEGATRON), "--gpus", 6], "--gpus 6 must be a multiple of tp * pp * cp = 4"),
        ([command(MEGATRON), "--tp", 2], "--tp cannot be combined with --from."),
        ([FOLDER / "accelerate/float8.yaml"], "None of the keys in"),
    ],
)
def test_bad_input_is_one_message(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--gpu", "h100", "--from", *map(str, words)])
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_errors_by_kind_are_those_of_the_published_rows():
    """All rows that constants are fitted to are of dense models, and held out."""
    tables = json.loads(held_out.RESULTS.read_text())["tables"].values()
    for error in published_errors.published_errors():
        if error.kind != "dense models":
            assert not error.held_out
            continue
        deviations = [row["deviation"] for table in tables if table["gpu"] == error.gpu for row in table["rows"]]
        assert error.held_out and error.rows == len(deviations)
        assert error.median == pytest.approx(statistics.median(map(abs, deviations)), abs=1e-4)
        assert (error.lowest, error.highest) == pytest.approx((min(deviations), max(deviations)), abs=1e-4)


def test_a_kind_without_published_runs_says_so():
    search, choice, *_ = plan_of(FOLDER / "axolotl/lora-8b.yml", "--gpus", 8, "--model", "llama-3.2-1b")
    assert "No published run of this kind (adapters)" in published_errors.describe_error(search.job, choice)[1]
    dense, own, *_ = plan_of(command(MEGATRON), "--gpu", "a100")
    error, sentence = published_errors.describe_error(dense.job, own)
    assert error is not None and "A100" in sentence and isinstance(own, LayoutChoice)
    blackwell, own, *_ = plan_of(command(MEGATRON), "--gpu", "b200")
    assert "No published run of this kind on b200" in published_errors.describe_error(blackwell.job, own)[1]
