"""Loss, gradient norm, weight decay and the hand-over between stages, on real ranks against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megalite.model.spec_builder import padded_vocabulary
from megalite.parallel.microbatch import IGNORE_INDEX
from tests.support import jobs_parts
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces import layouts
from tests.support.spaces.layouts import Case

MODEL: Case = {**SINGLE, "tied": True, "kv_heads": 1, "vocab_size": 101, "layers": 5, "masked": True, "dropout": 0.0}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def world(layout: Case) -> int:
    return layouts.world({**SINGLE, **layout})


# ---- loss


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-2)])
@pytest.mark.parametrize("vocab", [96, 101, 13])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cross_entropy_of_a_split_vocabulary_is_torchs(tp, vocab, smoothing, z_loss, ranks):
    """fp64; some rows are ignored; padded columns hold logits of 50 and must neither win nor take part. tp 4 of 13
    leaves a rank bare."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(vocab, (40,), generator=generator)
    targets[::3] = IGNORE_INDEX
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf, targets, label_smoothing=smoothing, ignore_index=IGNORE_INDEX, reduction="sum")
    loss = 0.125 * (loss + z_loss * leaf.logsumexp(1)[targets != IGNORE_INDEX].square().sum())
    loss.backward()
    padded = padded_vocabulary(vocab, tp)
    got = ranks.run(tp, jobs_parts.cross_entropy, logits, targets, smoothing, z_loss, padded)
    assert [value for value, _ in got] == pytest.approx([loss.item()] * tp, rel=1e-12)
    gradient = torch.cat([part for _, part in got], dim=1)
    torch.testing.assert_close(gradient[:, :vocab], leaf.grad, rtol=1e-11, atol=1e-13)
    assert not gradient[:, vocab:].any() and not gradient[::3].any()


RAGGED = {"masked": True, "kv_heads": 2, "tied": False}


@pytest.mark.parametrize("layout", [{"microbatches": 4}, {"dp": 2, "microbatches": 2}, {"dp": 4, "microbatches": 8}])
def test_loss_is_the_mean_over_every_token_not_a_mean_of_means(layout, ranks, prefix):
    """Microbatches and dp ranks count unequal numbers of tokens; the reference sums plain cross-entropies of plain
    logits."""
    config = config_of({**MODEL, **RAGGED, **layout}, prefix, "fp64", run={"dir": prefix + "_runs", "name": "ragged"})
    got = ranks.run(world(layout), jobs_parts.token_losses, config, False)
    sums, counts = ([value for result in got for value in result[index]] for index in (0, 1))
    assert [reported for *_, reported in got] == pytest.approx([sum(sums) / sum(counts)] * len(got), rel=1e-12)
    mean_of_means = sum(total / count for total, count in zip(sums, counts, strict=True)) / len(sums)
    assert len(set(counts)) > 1 and abs(mean_of_means - sum(sums) / sum(counts)) > 1e-6


@pytest.fixture(scope="module")
def validation(tmp_path_factory) -> str:
    """23 samples of 16 tokens: global batches of 32, 8 or 5 end ragged."""
    return write_tokens(tmp_path_factory.mktemp("validation"), MODEL["vocab_size"], count=16 * 23 + 5, seed=5)


EVALUATED: dict[str, tuple[Case, int]] = {  # layout, global batch
    "single": ({"microbatches": 1}, 8),
    "dp3": ({"dp": 3, "microbatches": 1}, 24),
    "tp2-sp-pp2-dp2": (
        {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "gpipe", "dp": 2, "zero": 1},
        8,
    ),
    "cp2-pp2": ({"cp": 2, "context": "gather", "pp": 2}, 8),
}


@pytest.fixture(scope="module")
def validation_config(prefix, validation):
    def of(layout: Case, batch: int, name: str) -> dict[str, Any]:
        case = {**MODEL, "dropout": 0.3, **layout}
        train = {
            "steps": 20,
            "global_batch_size": batch,
            "micro_batch_size": 1 if batch < 24 else 4,
            "precision": "fp64",
        }
        config = config_of(case, prefix, "fp64", data={"validation": validation}, train=train)
        config["run"]["name"] = name
        return config

    return of


def test_evaluation_is_the_mean_over_every_validation_token(ranks, validation_config):
    """Of plain logits without dropout, the last, ragged batch included; before any step, on one process."""
    sums, counts, reported = ranks.run(1, jobs_parts.token_losses, validation_config({}, 8, "plain"), True)[0]
    assert len(counts) == 24 and counts[-1] == 0, (
        "the last row of the last batch stands in for a sample that does not exist"
    )
    assert reported == pytest.approx(sum(sums) / sum(counts), rel=1e-12)


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_is_the_same_on_every_layout_and_leaves_training_alone(name, ranks, references, validation_config):
    from tests.support import jobs_training

    layout, batch = EVALUATED[name]
    expected = references.run(jobs_training.evaluate, validation_config({}, batch, "one"), 2)
    assert expected[0] != expected[1]
    for got in ranks.run(world(layout), jobs_training.evaluate, validation_config(layout, batch, name), 2):
        assert got == pytest.approx(expected, rel=1e-10)


def test_context_parallel_ranks_read_the_rows_of_their_replica(ranks, prefix):
    """The order of the data depends on the dp rank and size alone: dp 2 reads the same rows whether or not cp shares
    each sequence."""
    case = {**MODEL, "dp": 2, "microbatches": 2}
    plain = {result["dp"]: result["rows"] for result in ranks.run(2, jobs_parts.rows_read, config_of(case, prefix))}
    for result in ranks.run(4, jobs_parts.rows_read, config_of(case, prefix, parallel={"cp": 2})):
        assert result["rows"] == plain[result["dp"]]


# ---- gradients


NORM_LAYOUTS: dict[str, Case] = {
    "single": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "tp4 with shared key-value heads": {"tp": 4},
    "pp2, tied": {"pp": 2},
    "pp4, tied": {"pp": 4},
    "dp3": {"dp": 3},
    "dp3-zero1": {"dp": 3, "zero": 1},
    "tp2-pp2-dp2-zero1": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    "tp2-pp2-dp2": {"tp": 2, "pp": 2, "dp": 2},
}


@pytest.mark.parametrize("layout", NORM_LAYOUTS)
def test_gradient_norm_counts_every_global_element_once(layout, ranks, prefix):
    """Copies of tied weights, replicas of key-value heads, padding, and shards of others are all in memory, and none
    counts."""
    config = config_of({**MODEL, **NORM_LAYOUTS[layout]}, prefix, model={"qk_norm": "full"})
    gradients = jobs_parts.random_gradients(config, 3)
    expected = sum(value.square().sum() for value in gradients.values()).sqrt().item()
    got = ranks.run(world(NORM_LAYOUTS[layout]), jobs_parts.gradient_norm, config, gradients)
    assert got == pytest.approx([expected] * len(got), rel=1e-6)
    assert len(set(got)) == 1


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(ranks, prefix):
    """Weights and moments stay as they were, the step is counted as skipped, and training goes on alike on every
    rank."""
    from tests.support import jobs_training

    case = {**MODEL, "tp": 2, "pp": 2, "dp": 2, "zero": 1, "microbatches": 2}
    got = ranks.run(8, jobs_training.train_with_infinite_gradient, config_of(case, prefix), 3, 5, 5)
    for result in got:
        assert result["skipped"] == [False, False, True, False, False] and result["count"] == 1
        assert result["losses"] == got[0]["losses"] and all(loss < 10 for loss in result["losses"])
        before, after = result["kept"]
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert result["under_way"] == 0, (
            "a closed trainer has awaited every message: the next user of its groups would get them"
        )
    norms = got[0]["grad_norms"]
    assert norms[2] == float("inf") and all(norm < 100 for norm in norms[:2] + norms[3:])


@pytest.mark.parametrize("layout", [{}, {"dp": 3, "zero": 1}, {"tp": 2, "pp": 2, "zero": 1}])
def test_weight_decay_reaches_matrices_alone_wherever_a_shard_is_cut(layout, ranks, prefix):
    biased = {"attention_bias": True, "mlp_bias": True, "norm": "layer", "position": "learned"}
    config = config_of({**MODEL, **layout}, prefix, "fp64", model=biased, optimizer={"weight_decay": 0.2})
    before, after = ranks.run(world(layout), jobs_parts.step_without_gradient, config)[0]
    for name, value in before.items():
        decayed = value.dim() > 1
        torch.testing.assert_close(
            after[name], value * (1 - 0.25 * 0.2) if decayed else value, rtol=1e-15, atol=0, msg=name
        )
    assert {value.dim() for value in before.values()} == {1, 2}


def test_initial_weights_are_the_same_bits_on_every_mesh(ranks, prefix):
    """And a rank draws the blocks of its shard alone; with ZeRO-0 these are all that it holds."""
    from tests.support import jobs_training

    expected = ranks.run(1, jobs_training.initial_weights, config_of(MODEL, prefix))[0][0]
    sharded = [{"dp": 4, "zero": zero} for zero in (1, 3)]
    for layout in ({"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2, "dp": 2, "zero": 1}, *sharded):
        results = ranks.run(world(layout), jobs_training.initial_weights, config_of({**MODEL, **layout}, prefix))
        got = results[0][0]
        assert got.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in got.items())
        assert all(drawn == held for _, drawn, held in results), layout


def test_a_model_that_is_loaded_draws_no_weights(ranks, prefix):
    from tests.support import jobs_training

    config = config_of({**MODEL, "dp": 2, "zero": 3}, prefix)
    config["run"] |= {"name": "loaded"}
    directory = ranks.run(2, jobs_training.train_and_save_each, config, [1])[0][0]
    for start in ({"checkpoint": {"load": directory}}, {"model": config["model"] | {"init_from": directory}}):
        assert [drawn for _, drawn, _ in ranks.run(2, jobs_training.initial_weights, {**config, **start})] == [0, 0]


# ---- between stages


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_messages_arrive_in_order_and_their_memory_is_freed(stages, schedule, ranks):
    """Each stage doubles, the last sums; outputs live no longer than their microbatch is in flight."""
    microbatches, shape = 8, (64, 4, 8)
    got = ranks.run(stages, jobs_parts.hand_over, schedule, microbatches, shape)
    elements, factor = 64 * 4 * 8, 2 ** (stages - 1)
    total = sum(range(1, microbatches + 1))
    assert got[-1]["loss"] == 0.5 * factor * total * elements
    assert got[0]["gradient"] == 0.5 * factor * total * elements
    for stage, result in enumerate(got):
        assert result["received"] == [2**stage * (index + 1) for index in range(microbatches)]
        assert result["alive"] == 0
    # only what the schedule has in flight, without the microbatch whose backward has run
    for stage, result in enumerate(got[:-1]):
        in_flight = microbatches if schedule == "gpipe" else stages - stage
        limits = [min(in_flight - 1, microbatches - done) for done in range(1, microbatches + 1)]
        assert all(alive <= limit for alive, limit in zip(result["alive_in_backward"], limits, strict=True))
        assert result["freed_in_backward"] == [True] * microbatches, "neither the graph nor a send keeps an output"
