"""The reference of an objective: what rejects it, and what a run that resumes finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megalite.assembly.parts import make_mesh
from megalite.checkpoint import CheckpointError
from megalite.commands import convert
from megalite.commands.train import check_run
from megalite.config.errors import ConfigError
from megalite.config.extensions import EXTENSIONS, load_extensions
from megalite.config.load import from_dict
from megalite.families.model_config import hf_shape
from megalite.training import teacher
from megalite.training.trainer import Trainer
from tests.support import jobs_quantized
from tests.support.configs import write_tokens
from tests.support.preferences import VOCAB, write_preferences


def configuration(model: Path, prefix: str, place: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(place), "name": "run"},
        "model": hf_shape(str(model)) | {"from_hf": str(model), "init_from": f"hf:{model}"},
        "parallel": {"dp": 1},
        "data": {"train": prefix, "sequence_length": 32, "shuffle": False},
        "train": {"steps": 4, "global_batch_size": 6, "micro_batch_size": 3, "objective": "dpo"},
        "optimizer": {"lr": 2e-2, "warmup_steps": 0},
    }
    return {name: tree.get(name, {}) | changes.get(name, {}) for name in tree | changes}


def trainer_of(tree: dict[str, Any]) -> Trainer:
    config = from_dict(tree)
    return Trainer(config, make_mesh(config))


def saved_run(tree: dict[str, Any]) -> None:
    trainer = trainer_of(tree)
    trainer.step()
    trainer.save()
    trainer.close()


def test_a_run_whose_start_has_changed_does_not_resume(model, prefix, tmp_path):
    """One element of its weights, or the adapter that it continues is not named any more."""
    start = tmp_path / "start"
    shutil.copytree(model, start)
    tree = configuration(start, prefix, tmp_path)
    saved_run(tree)
    trainer_of(tree).close()  # it would resume
    changed = AutoModelForCausalLM.from_pretrained(start)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    changed.save_pretrained(start)
    with pytest.raises(ConfigError, match="whose start was another one than model.init_from = hf:.*start"):
        trainer_of(tree)
    named = {"preference": {"reference": f"hf:{model}"}, "checkpoint": {"allow": ["objective"]}}
    trainer_of(tree | named).close()  # it names its reference


def test_a_run_that_named_no_copy_does_not_go_on_with_one(model, prefix, tmp_path):
    saved_run(configuration(model, prefix, tmp_path, preference={"reference": f"hf:{model}"}))
    with pytest.raises(ConfigError, match=r"=null \(the start of the run, model\.init_from=hf:.*allow=\[objective\]"):
        trainer_of(configuration(model, prefix, tmp_path))


def test_another_objective_or_reference_needs_consent(model, prefix, tmp_path):
    """The state of the optimizer is of the loss of before. With consent the way back is open, too."""
    consent = {"checkpoint": {"allow": ["objective"]}}
    tree = configuration(model, prefix, tmp_path, train={"objective": "ipo"})
    saved_run(tree)
    dpo = configuration(model, prefix, tmp_path)
    with pytest.raises(ConfigError, match=r"objective=dpo does not .*objective=ipo.*checkpoint\.allow=\[objective\]"):
        trainer_of(dpo)
    saved_run(dpo | consent)
    other = dpo | {"preference": {"reference": f"hf:{model}"}}
    with pytest.raises(ConfigError, match=r"reference=hf:.*\(preference\.reference=null .*allow=\[objective\]"):
        trainer_of(other)
    saved_run(other | consent)
    trainer_of(other).close()  # nothing has changed
    saved_run(dpo | consent)
    trainer_of(dpo).close()


def test_a_run_with_a_copy_may_change_to_a_teacher(model, prefix, tmp_path):
    """Which has no start to compare; that the objective is another one is listed."""
    tree = configuration(model, prefix, tmp_path)
    saved_run(tree)
    tree["train"] |= {"objective": "distillation"}
    tree["data"] |= {"train": write_tokens(tmp_path, VOCAB)}
    tree |= {"distillation": {"teacher": f"hf:{model}"}, "checkpoint": {"allow": ["data", "objective"]}}
    trainer = trainer_of(tree)
    trainer.step()
    trainer.close()
    assert any("train.objective" in note and "distillation" in note for note in trainer.notes)


def test_the_objective_of_an_extension_that_is_not_named_any_more(model, prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(EXTENSIONS, "objectives", {})
    monkeypatch.setattr(EXTENSIONS, "files", {})
    file = tmp_path / "own.py"
    file.write_text(
        "from megalite.config.extensions import objective\nfrom megalite.objectives.dpo import DPO\n"
        "@objective('own')\nclass Own(DPO): pass\n"
    )
    tree = configuration(model, prefix, tmp_path, run={"extensions": [str(file)]}, train={"objective": "own"})
    load_extensions([str(file)])
    saved_run(tree)
    EXTENSIONS.objectives.clear()
    del tree["run"]["extensions"]
    tree["train"] |= {"objective": "dpo"}
    with pytest.raises(ConfigError, match=rf'Name the file again \(run.extensions was \["{file}"\]\)'):
        trainer_of(tree)


def test_a_second_model_that_has_changed_is_not_taken_for_that_of_before(model, prefix, tmp_path):
    """A run that has saved another checkpoint, and files of Hugging Face. Checkpoints can be named instead."""
    files = tmp_path / "files"
    shutil.copytree(model, files)
    first = trainer_of(configuration(model, prefix, tmp_path, run={"name": "first"}))
    steps, trees = [first.save()], []
    for name, reference in (("of run", str(tmp_path / "first")), ("of files", f"hf:{files}")):
        trees.append(configuration(model, prefix, tmp_path, run={"name": name}, preference={"reference": reference}))
        saved_run(trees[-1])
        trainer_of(trees[-1]).close()  # it would resume
    first.step()
    steps.append(first.save())
    first.close()
    changed = AutoModelForCausalLM.from_pretrained(files)
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-3
    changed.save_pretrained(files)
    with pytest.raises(ConfigError, match=f"and is {steps[1]}.*set preference.reference to {steps[0]} while"):
        trainer_of(trees[0])
    with pytest.raises(ConfigError, match=f"it was hf:{files}, with other weights.* restore its files"):
        trainer_of(trees[1])
    for step, allow in zip(steps, ([], ["objective"]), strict=True):  # the first has the weights of before
        named = {"preference": {"reference": str(step)}, "checkpoint": {"allow": allow}}
        trainer_of(trees[0] | named).close()


def test_the_copy_is_a_second_model_saved_at_the_start(model, prefix, tmp_path):
    """Of experts whose routers learn biases besides the weights."""
    routers = {"num_experts": 4, "router_scores": "sigmoid", "router_balance": "bias", "router_bias_rate": 0.5}
    tree = configuration(model, prefix, tmp_path)
    tree["model"] |= routers | {"from_hf": None, "init_from": None}
    losses, start = [], None
    for name in ("copy", "second"):
        reference = {"preference": {"reference": None if start is None else str(start)}}
        trainer = trainer_of(tree | reference | {"run": tree["run"] | {"name": name}})
        start = start or trainer.save()
        losses.append([trainer.step().loss for _ in range(4)])
        trainer.close()
    assert losses[0] == losses[1] and abs(losses[0][-1] - losses[0][0]) > 0.01


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("option", "layout"), [("preference.reference", {"tp": 2}), ("distillation.teacher", {"dp": 1})]
)
def test_a_second_model_may_have_a_quantized_base(option, layout, model, prefix, tmp_path, ranks):
    """It is its export, with the adapters merged into the values of the base. One whose base has moved is refused."""
    start = Path(shutil.copytree(model, tmp_path / "start"))
    saved_run(configuration(start, prefix, tmp_path, lora={"rank": 4, "base": "nf4"}, optimizer={"lr": 0.1}))
    saved = tmp_path / "run"
    assert convert.main(["export", str(saved), str(tmp_path / "merged")]) == 0
    section, field = option.split(".")
    changes: dict[str, dict[str, Any]] = {"run": {"name": "second"}, "checkpoint": {"load": "none"}, "parallel": layout}
    if section == "distillation":
        changes |= {"train": {"objective": "distillation"}, "data": {"train": write_tokens(tmp_path, VOCAB)}}
    losses = []
    for name in (str(saved), f"hf:{tmp_path / 'merged'}", f"hf:{model}"):
        tree = configuration(model, prefix, tmp_path, **changes, **{section: {field: name}})
        losses.append(ranks.run(layout.get("tp", 1), jobs_quantized.train, tree, 2)[0]["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] != pytest.approx(losses[2], rel=1e-4)
    start.rename(tmp_path / "moved")
    tree = configuration(model, prefix, tmp_path, **changes, **{section: {field: str(saved)}})
    with pytest.raises(ConfigError, match=f"{option} = .*/start cannot be read.*convert export .* and set {option}"):
        teacher.check(from_dict(tree), layout.get("tp", 1))


BAD: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "no directory": ({"preference": {"reference": "hf:nowhere"}}, "nowhere"),
    "no checkpoint": ({"preference": {"reference": "nowhere"}}, "nowhere"),
    "vocabulary": ({"model": {"vocab_size": 100}}, "but model.vocab_size = 100: both models need the same tokens"),
    "rows": (
        {"data": {"sequence_length": 33}, "train": {"objective": "kto"}},
        "but data.sequence_length = 33. Set data.sequence_length to 32, or use another reference",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_is_no_reference_is_rejected(name, model, prefix, tmp_path):
    changes, says = BAD[name]
    tree = configuration(model, prefix, tmp_path, preference={"reference": f"hf:{model}"})
    for section, values in changes.items():
        tree[section] = tree[section] | values
    with pytest.raises(ConfigError, match="preference.reference = ") as error:
        teacher.check(from_dict(tree), 1)
    assert says in str(error.value)


def test_documents_are_as_long_as_the_positions_of_a_reference(model, prefix, tmp_path):
    """Rows may be longer: positions start again with each document. Here the reference is the start itself."""
    longer = {"model": {"max_position_embeddings": 64}, "data": {"sequence_length": 60, "packing": True}}
    losses = []
    for reference in (None, f"hf:{model}"):
        tree = configuration(model, prefix, tmp_path, preference={"reference": reference}, checkpoint={"load": "none"})
        for section, values in longer.items():
            tree[section] = tree[section] | values
        tree["train"] |= {"global_batch_size": 2, "micro_batch_size": 1}
        teacher.check(from_dict(tree), 1)
        trainer = trainer_of(tree)
        losses.append([trainer.step().loss for _ in range(3)])
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and abs(losses[0][-1] - losses[0][0]) > 0.01
    tree["data"]["train"] = write_preferences(tmp_path / "long", [(20, 13, 3)])
    with pytest.raises(ConfigError, match=r"reads up to 32 positions, but a document of the data has 33\. Prepare"):
        teacher.check(from_dict(tree), 1)


def test_a_run_says_which_reference_it_has(model, prefix, tmp_path):
    for changes, said in (
        ({}, "reference of dpo: the start of the run, a copy of what is trained"),
        ({"lora": {"rank": 4}}, "reference of dpo: the start of the run, the model with its adapters off"),
        ({"preference": {"reference": f"hf:{model}"}}, f"reference of dpo: hf:{model}, a second model"),
    ):
        _, _, remarks = check_run(from_dict(configuration(model, prefix, tmp_path, **changes)))
        assert any(line.startswith(said) for line in remarks), said


def test_a_reference_without_finite_weights_is_named(model, prefix, tmp_path):
    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    tree = configuration(model, prefix, tmp_path, preference={"reference": f"hf:{tmp_path}/broken"})
    with pytest.raises(CheckpointError, match="preference.reference = hf:.*contains NaN"):
        trainer_of(tree)


def test_a_name_without_its_beginning_is_completed(model, prefix, tmp_path):
    (tmp_path / "scores.json").touch()
    for path, begins, options in (
        (model, "hf:", {"preference": {"reference": str(model)}}),
        (tmp_path, "scores:", {"preference": {"reference": str(tmp_path)}}),
        (model, "hf:", {"train": {"objective": "distillation"}, "distillation": {"teacher": str(model)}}),
    ):
        with pytest.raises(ConfigError, match=f"Set it to {begins}{path}"):
            teacher.check(from_dict(configuration(model, prefix, tmp_path, **options)), 1)


def test_a_reference_with_another_tokenizer_is_rejected(model, prefix, tmp_path):
    named = str(tmp_path / "tokens")
    for file in Path(prefix).parent.glob(Path(prefix).name + ".*"):
        shutil.copy(file, named + file.suffix)
    about = Path(named + ".json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"tokenizer": "byte"}))
    tree = configuration(model, named, tmp_path, preference={"reference": f"hf:{model}"})
    with pytest.raises(ConfigError, match="uses a different tokenizer than preference.reference"):
        teacher.check(from_dict(tree), 1)
