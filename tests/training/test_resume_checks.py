"""What a checkpoint may be resumed with, and what is refused and how, in one process."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megalite.assembly import parts as build
from megalite.commands.train import announce
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict
from megalite.config.run_length import resolve_steps
from megalite.config.schema import Config
from megalite.monitoring.epochs import Epochs, repeated
from megalite.training import resume_checks, validation
from megalite.training.fit import fit
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {
    **SINGLE,
    "tied": False,
    "kv_heads": 2,
    "vocab_size": 96,
    "layers": 2,
    "masked": False,
    "dropout": 0.0,
    "microbatches": 4,
}
STEPS = 3


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.fixture(scope="module")
def other_prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("other"), 96, seed=9)


def trainer(prefix: str, run: dict[str, Any], restarted: bool = False, **changes: dict[str, Any]) -> Trainer:
    config = config_of(CASE, prefix, run=run)
    config["checkpoint"] = {}
    run_config = from_dict(
        {section: {**config.get(section, {}), **changes.get(section, {})} for section in {**config, **changes}}
    )
    resolve_steps(run_config)
    return Trainer(run_config, build.make_mesh(run_config), restarted=restarted)


@pytest.fixture(scope="module")
def run(prefix, tmp_path_factory) -> dict[str, Any]:
    """A run of three steps, with a checkpoint after the second and after the third."""
    named = {"dir": str(tmp_path_factory.mktemp("runs")), "name": "first"}
    started = trainer(prefix, named)
    for step in range(1, STEPS + 1):
        started.step()
        if step > 1:
            started.save()
    started.close()
    return named


def test_auto_takes_the_newest_none_starts_afresh_and_a_path_is_a_path(prefix, run):
    older = f"{run['dir']}/first/checkpoints/step_00000002"
    for load, step in (("auto", 3), ("none", 0), (older, 2)):
        started = trainer(prefix, run, checkpoint={"load": load})
        started.close()
        assert (started.step_done, started.samples) == (step, 32 * step)
    fresh = trainer(prefix, {**run, "name": "second"})
    fresh.close()
    assert fresh.step_done == 0


def test_a_restarted_job_goes_on_with_its_own_checkpoint_and_not_once_more_with_that_of_its_first_start(prefix, run):
    older = f"{run['dir']}/first/checkpoints/step_00000002"
    for load, start in (("none", 0), (older, 2)):
        own, options = {**run, "name": f"from {start}"}, {"load": load}
        first = trainer(prefix, own, checkpoint=options)
        assert first.step().step == start + 1
        first.save()
        first.close()
        again = trainer(prefix, own, checkpoint=options)
        again.close()
        assert again.step_done == start, "started by hand"
        for changes, step in (({}, start + 1), ({"optimizer": {"lr": 1e-4}}, start)):
            restarted = trainer(prefix, own, restarted=True, checkpoint=options, **changes)
            restarted.close()
            assert restarted.step_done == step, "a checkpoint with other options is of another job"


def without_newer_options(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration as it was stored before there were a section and an option."""
    tree = {section: dict(keys) for section, keys in tree.items() if section != "network"}
    del tree["train"]["label_smoothing"]
    return tree


def with_a_removed_option(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "train": {**tree["train"], "no_longer_known": 1}}


@pytest.mark.parametrize(("stored", "step"), [(without_newer_options, 1), (with_a_removed_option, 0)])
def test_a_restarted_job_compares_options_with_their_defaults_filled_in(stored, step, prefix, run, monkeypatch):
    """An option that has come since does not hide the job's own checkpoint; one that has gone makes it another job's,
    and no error."""
    own, options = {**run, "name": stored.__name__}, {"load": "none"}
    with monkeypatch.context() as patch:
        patch.setattr("megalite.training.checkpointing.to_dict", lambda config: stored(to_dict(config)))
        first = trainer(prefix, own, checkpoint=options)
        first.step()
        first.save()
        first.close()
    restarted = trainer(prefix, own, restarted=True, checkpoint=options)
    restarted.close()
    assert restarted.step_done == step


def test_the_order_of_the_targets_of_adapters_is_no_change(prefix):
    def config(targets: list[str], saved: list[str]) -> Config:
        return from_dict(config_of(CASE, prefix) | {"lora": {"rank": 2, "targets": targets, "modules_to_save": saved}})

    state = {"config": to_dict(config(["q", "v"], ["head", "norms"])), "fingerprint": "the same"}
    same = config(["v", "q", "v"], ["norms", "head"])
    resume_checks.check_resume(same, "the same", state, Path("step_1"))
    assert resume_checks.is_same_run(same, state["config"]) and resume_checks.changes(same, state, {}) == []
    other = config(["v", "k"], ["norms", "head"])
    with pytest.raises(ConfigError, match=r"lora.targets was \['q', 'v'\], is \['k', 'v'\]\. To train"):
        resume_checks.check_resume(other, "the same", state, Path("step_1"))
    assert not resume_checks.is_same_run(other, state["config"])


def test_a_warm_up_of_indexers_is_a_run_of_its_own(prefix):
    def config(phase: str) -> Config:
        return from_dict(config_of(CASE, prefix) | {"train": {"indexer": phase}})

    state = {"config": to_dict(config("warmup")), "fingerprint": "the same"}
    resume_checks.check_resume(config("warmup"), "the same", state, Path("step_1"))
    with pytest.raises(ConfigError, match=r"train.indexer=sparse does not match .*model.init_from=step_1"):
        resume_checks.check_resume(config("sparse"), "the same", state, Path("step_1"))


def test_compression_depends_on_a_split_sequence_where_ranks_share_matrices(prefix):
    """The matrices of latents are whole on each tp rank; those of plain attention are split."""
    latents = {"num_key_value_heads": None, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}

    def config(model: dict[str, Any], split: bool) -> Config:
        tree = config_of({**CASE, "tp": 2, "dp": 2, "sequence_parallel": split}, prefix)
        tree["parallel"]["powersgd_rank"] = 2
        return from_dict(tree | {"model": tree["model"] | model})

    for model, notes in ((latents, 1), ({}, 0)):
        state = {"config": to_dict(config(model, False))}
        assert len(resume_checks.changed_compression(config(model, True), state)) == notes


def test_a_signal_is_answered_with_a_save_before_a_validation_that_is_due(prefix, run, monkeypatch):
    changes = {
        "validation": {"interval": 2, "batches": 1},
        "faults": {"inject": "sigterm:rank=0,step=2"},
        "train": {"watchdog": None},
    }
    started = trainer(prefix, {**run, "name": "signalled"}, data={"validation": 0.2}, **changes)
    losses, there = validation.losses, []

    def validate(of: Trainer) -> validation.Losses:
        there.extend(path.name for path in (started.run_dir / "checkpoints").iterdir())
        return losses(of)

    monkeypatch.setattr(validation, "losses", validate)
    try:
        fit(started)
    finally:
        gc.unfreeze()
        gc.enable()
        started.close()
    assert started.step_done == 2 and set(there) == {"latest", "step_00000002"}
    assert '{"step": 2, "val_loss": ' in (started.run_dir / "metrics.jsonl").read_text()


REFUSED = {
    "another width": ({"model": {"intermediate_size": 64}}, "model.intermediate_size was 48, is 64"),
    "two changes": (
        {"model": {"rope_theta": 1e6, "tie_word_embeddings": True}},
        r"tie_word_embeddings was False, is True; .*rope_theta",
    ),
    "another horizon": (
        {"train": {"steps": 40}},
        r"train\.steps=40 does not match .*train\.steps=20.*checkpoint\.allow=\[horizon\]",
    ),
    "another sequence length": (
        {"data": {"sequence_length": 8}},
        r"other samples: data\.sequence_length was 16, is 8\. .*checkpoint\.allow=\[data\]",
    ),
    "another order": (
        {"data": {"shuffle": False}},
        r"other samples: data\.shuffle was true, is false\. .*checkpoint\.allow=\[data\]",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_changed_run_is_refused_by_name(change, prefix, run):
    changes, message = REFUSED[change]
    with pytest.raises(ConfigError, match=message):
        trainer(prefix, run, **changes)


def test_another_seed_is_named(prefix, run):
    with pytest.raises(ConfigError, match=r"other samples: run\.seed was \d+, is 5\. .*checkpoint\.allow=\[data\]"):
        trainer(prefix, {**run, "seed": 5})


def test_a_resume_lists_every_change_in_a_table(prefix, run):
    """Also what may change without being allowed: it changes what the run learns, or how fast it is."""
    started = trainer(
        prefix,
        run,
        optimizer={"lr": 1e-4, "decay": "constant"},
        train={"micro_batch_size": 4},
        checkpoint={"load": "auto"},
    )
    started.close()
    table = [line.split() for line in started.notes]
    assert table[0] == ["changed", "since", "the", "checkpoint", "was", "is"]
    assert sorted(row[0] for row in table[1:]) == ["optimizer.decay", "optimizer.lr", "train.micro_batch_size"]
    assert ["optimizer.lr", "0.0003", "0.0001"] in table
    unchanged = trainer(prefix, run)
    unchanged.close()
    assert unchanged.notes == []


def test_epochs_resume_as_the_steps_that_they_are(prefix, run, capsys):
    """The same words change nothing; more epochs go on, and the data that is read again is named."""
    samples = (Path(f"{prefix}.bin").stat().st_size // 2 - 1) // 16
    own, constant = {**run, "name": "epochs"}, {"decay": "constant"}
    first = trainer(prefix, own, train={"epochs": 64 / samples}, optimizer=constant, logging={"interval": 1})
    try:
        assert first.config.train.steps == 2, "64 samples in steps of 32"
        fit(first, [Epochs(first)])
        again = trainer(prefix, own, train={"epochs": 64 / samples}, optimizer=constant)
        again.close()
        assert again.step_done == 2 and again.notes == [] and repeated(again) == []
        more = trainer(prefix, own, train={"epochs": 3.0}, optimizer=constant)
        more.close()
        assert more.config.train.steps == math.ceil(3 * samples / 32)
        assert [line.split() for line in more.notes][1:] == [["train.steps", "2", str(more.config.train.steps)]]
        assert repeated(more)[0].startswith(f"{prefix} is read 3")
    finally:
        gc.unfreeze()
        gc.enable()
        first.close()
    lines = [json.loads(line) for line in (first.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["tokens_seen"], line["epoch"]) for line in lines] == [(512, 32 / samples), (1024, 64 / samples)]
    assert "  1024 tokens  epoch " in capsys.readouterr().out


def test_another_version_of_the_code_is_listed(prefix, run, monkeypatch):
    monkeypatch.setattr("megalite.training.checkpointing.software", lambda: {"megalite": "0.0.1 (sources 01234567)"})
    started = trainer(prefix, run)
    started.close()
    assert any(line.split()[0] == "megalite" and "0.0.1" in line for line in started.notes)


def test_a_run_directory_stands_for_its_newest_checkpoint(prefix, run):
    """As the source of a resume and as that of initial weights."""
    place = f"{run['dir']}/{run['name']}"
    resumed = trainer(prefix, {**run, "name": "resumed"}, checkpoint={"load": place})
    resumed.close()
    assert resumed.step_done == 3
    started = trainer(prefix, {**run, "name": "started"}, model={"init_from": place})
    started.close()
    assert started.step_done == 0
    for name, value in started.store.weights.items():
        assert value.tensor.equal(resumed.store.weights[name].tensor), name


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            {"from_hf": "DIR"},
            "the weights are initialized randomly: model.from_hf=DIR only sets the shape; to load the weights, set "
            "model.init_from=hf:DIR",
        ),
        (
            {"from_hf": "DIR", "init_from": "none"},
            "the weights are initialized randomly: model.from_hf=DIR only sets the shape; as requested by",
        ),
        ({"init_from": "none"}, None),
    ],
)
def test_random_weights_are_announced_where_a_model_gave_its_shape(prefix, tmp_path, capsys, model, line):
    """In the first lines, and only of a run that starts; the weights are those of a run without the option."""
    plain, named = (
        trainer(prefix, {"dir": str(tmp_path), "name": "plain"}),
        trainer(prefix, {"dir": str(tmp_path), "name": "x"}, model=model),
    )
    for name, value in named.store.weights.items():
        assert value.tensor.equal(plain.store.weights[name].tensor), name
    capsys.readouterr()
    announce(named, [])
    first = capsys.readouterr().out.splitlines()[:6]
    assert (
        any(said.startswith(line) for said in first)
        if line
        else not any("initialized randomly" in said for said in first)
    )
    named.step()
    announce(named, [])
    assert "initialized randomly" not in capsys.readouterr().out
    plain.close(), named.close()


def test_other_data_is_refused_and_may_be_allowed(other_prefix, run):
    with pytest.raises(ConfigError, match="other data"):
        trainer(other_prefix, run)
    started = trainer(other_prefix, run, checkpoint={"allow": ["data"]})
    assert started.step_done == 3 and started.step().step == 4
    started.close()


def test_allowing_one_change_allows_no_other(prefix, other_prefix, run):
    longer = {"train": {"steps": 40}}
    with pytest.raises(ConfigError, match=r"train\.steps"):
        trainer(prefix, run, **longer, checkpoint={"allow": ["data"]})
    with pytest.raises(ConfigError, match="other data"):
        trainer(other_prefix, run, checkpoint={"allow": ["horizon"]})
    with pytest.raises(ConfigError, match="model does not match"):
        trainer(prefix, run, model={"intermediate_size": 64}, checkpoint={"allow": ["data", "horizon"]})
    trainer(prefix, run, **longer, checkpoint={"allow": ["horizon"]}).close()


def test_what_does_not_change_the_mathematics_may_change(prefix, run):
    """Recomputation, buckets and the micro-batch size are free; so is the learning rate, which is the user's to
    steer."""
    started = trainer(
        prefix,
        run,
        train={"recompute": "full", "micro_batch_size": 4},
        parallel={"bucket_mb": 1.0},
        optimizer={"lr": 1e-4},
    )
    started.close()
    assert started.step_done == 3
