"""Tokens and epochs of a run, against counting samples by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megalite.config.samples import Member
from megalite.config.schema import Config
from megalite.monitoring.epochs import Epochs, repeated
from tests.monitoring.test_metrics import example

WHOLE = [Member("data/a", 100)]
BLEND = [Member("data/a", 100, 0.75), Member("data/b", 10, 0.25)]


def trainer(members: list[Member], steps: int, *, batch: int = 8, done: int = 0, samples: int | None = None) -> Any:
    config = Config()
    config.train.steps, config.train.global_batch_size, config.data.sequence_length = steps, batch, 16
    data = SimpleNamespace(members=members)
    return SimpleNamespace(
        config=config, train_data=data, step_done=done, samples=done * batch if samples is None else samples
    )


def run(of: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The numbers and lines of all steps."""
    observer, numbers, lines = Epochs(of), [], []
    for step in range(of.step_done + 1, of.config.train.steps + 1):
        of.step_done, of.samples = step, of.samples + of.config.train.global_batch_size
        numbers.append(observer.numbers(example(step)))
        lines += observer.lines(example(step))
    return numbers, lines


def test_a_step_has_the_tokens_and_epochs_until_its_end() -> None:
    numbers, _ = run(trainer(WHOLE, 50))
    assert numbers[0] == {"tokens_seen": 8 * 16, "epoch": 0.08} and numbers[-1] == {
        "tokens_seen": 400 * 16,
        "epoch": 4.0,
    }


def test_a_blend_has_the_epoch_of_each_member_and_of_the_one_that_is_read_most_often() -> None:
    numbers, _ = run(trainer(BLEND, 10))
    assert numbers[-1] == {"tokens_seen": 80 * 16, "epoch": 2.0, "epoch/data/a": 0.6, "epoch/data/b": 2.0}


def test_a_result_that_is_known_a_step_late_is_that_of_its_step() -> None:
    late = trainer(WHOLE, 50, done=20)
    assert Epochs(late).numbers(example(19))["epoch"] == 19 * 8 / 100


def test_a_run_that_went_back_counts_the_samples_that_it_left_out() -> None:
    assert Epochs(trainer(WHOLE, 50, done=20, samples=200)).numbers(example(20))["epoch"] == 2.0


def test_the_end_of_an_epoch_is_a_line() -> None:
    """400 samples of 100: epochs end in steps 13 (104), 25 (200), 38 (304); the run ends with the last one."""
    whole, blend = run(trainer(WHOLE, 50))[1], run(trainer(BLEND, 12))[1]
    assert [line.partition(" after step ")[2].split(",")[0] for line in whole] == [
        "13",
        "25",
        "38",
    ]
    assert blend == [
        "data/b: finished epoch 1 of 2.4 after step 5, starting again from the beginning",
        "data/b: finished epoch 2 of 2.4 after step 10, starting again from the beginning",
    ]


def test_many_epochs_are_few_lines() -> None:
    lines = run(trainer([Member("data/a", 8)], 1000))[1]
    assert [int(line.split("epoch ")[1].split()[0]) for line in lines] == [
        *range(1, 10),
        *range(10, 100, 10),
        *range(100, 1000, 100),
    ]


def test_data_that_is_read_more_than_once_says_so_at_the_start() -> None:
    assert repeated(trainer(WHOLE, 12)) == [] and repeated(trainer(WHOLE, 13)) == [], (
        "104 samples: the last step is rounded up"
    )
    assert repeated(trainer(WHOLE, 29)) == ["data/a is read 2.32 times (it has 100 samples, and the run takes 232)"]
    assert repeated(trainer(BLEND, 12)) == ["data/b is read 2.4 times (it has 10 samples, and the run takes 24)"]
    assert repeated(trainer(WHOLE, 29, done=9, samples=200)) == [
        "data/a is read 3.6 times (it has 100 samples, and the run takes 360)"
    ]
