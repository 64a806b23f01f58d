"""Sample order, shuffling, blends and the split, against what their definitions say."""

import itertools
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.samples import LONGEST_PERIOD, interleave, whole_weights
from megalite.config.sections.data import DataConfig
from megalite.data.dataset import Concatenation, TokenRange, build, permute
from megalite.data.indexed import DataError
from megalite.data.mixtures import Blend

S = 5


def config(train, **options) -> DataConfig:
    return DataConfig(**{"train": train, "sequence_length": S, "shuffle": False} | options)


def first_tokens(dataset, count: int, start: int = 0) -> list[int]:
    return [int(dataset[i].tokens[0]) for i in range(start, start + count)]


def read(dataset, i: int) -> list[int]:
    """The tokens of a sample: its inputs, and the target of the last one."""
    tokens, targets, *others = dataset[i]
    assert {*others} == {None} and tokens.tolist()[1:] == targets.tolist()[:-1]
    return [*tokens.tolist(), int(targets[-1])]


@pytest.mark.parametrize(("tokens", "samples"), [(6, 1), (10, 1), (11, 2), (50, 9), (51, 10)])
def test_plain_order(counting, tokens, samples):
    dataset, validation = build(config(counting("x", tokens).prefix), seed=1)
    assert (validation, dataset.samples_per_epoch, dataset.vocab_size, dataset.eos) == (None, samples, 100, 99)
    for i in range(3 * samples):
        assert dataset[i].tokens.dtype == dataset[i].targets.dtype == np.int64
        assert read(dataset, i) == list(range(i % samples * S, i % samples * S + S + 1))


def test_a_list_is_one_concatenation(counting):
    """Samples cross from file to file, through a file shorter than a sample too."""
    files = [counting("a", 13), counting("b", 2, first=13), counting("c", 22, first=15)]
    dataset, _ = build(config([file.prefix for file in files]), seed=1)
    assert dataset.samples_per_epoch == 36 // S
    assert [read(dataset, i) for i in range(7)] == [list(range(i * S, i * S + S + 1)) for i in range(7)]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 600), key=st.integers(0, 2**63 - 1))
def test_permutation(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permutation_of_a_trillion():
    images = {permute(i, 10**12, key=5) for i in range(2000)}
    assert len(images) == 2000
    assert all(0 <= image < 10**12 for image in images)
    # 4.6 standard deviations of the mean of 2,000 uniform numbers
    assert abs(np.mean(list(images)) / 10**12 - 0.5) < 0.03


def test_permutations_are_uniform():
    """Over many keys each of 5 elements lands on each of 5 places equally often: chi-square, 16 degrees of freedom, p =
    1e-6."""
    counts = Counter((i, permute(i, 5, key * 7919)) for key in range(2000) for i in range(5))
    assert sum((counts[pair] - 400) ** 2 / 400 for pair in itertools.product(range(5), repeat=2)) < 61
    neighbours = Counter(
        (permute(7, 100, key * 7919 + 3) - permute(6, 100, key * 7919 + 3)) % 100 for key in range(10_000)
    )
    assert max(neighbours.values()) < 180  # about 101 each


def test_shuffled_epochs(counting):
    file = counting("x", 5 * 40 + 1)
    dataset, _ = build(config(file.prefix, shuffle=True), seed=1)
    epochs = [first_tokens(dataset, 40, start) for start in (0, 40, 80)]
    assert all(sorted(epoch) == list(range(0, 200, S)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(read(dataset, i) == list(range(dataset[i].tokens[0], dataset[i].tokens[0] + S + 1)) for i in range(120))
    again, other = (build(config(file.prefix, shuffle=True), seed=seed)[0] for seed in (1, 2))
    assert first_tokens(again, 120) == [*epochs[0], *epochs[1], *epochs[2]]
    assert first_tokens(other, 40) != epochs[0]


def test_order_does_not_depend_on_where_the_file_lies(counting, tmp_path):
    file = counting("x", 201)
    (tmp_path / "moved").mkdir()
    for end in ("bin", "idx", "json"):
        (tmp_path / "moved" / f"y.{end}").write_bytes(Path(f"{file.prefix}.{end}").read_bytes())
    one, two = (
        build(config(prefix, shuffle=True), seed=1)[0] for prefix in (file.prefix, str(tmp_path / "moved" / "y"))
    )
    assert first_tokens(one, 40) == first_tokens(two, 40)
    assert one.fingerprint == two.fingerprint


WEIGHTS = st.lists(st.one_of(st.integers(1, 40), st.floats(0.01, 5).map(lambda w: round(w, 2))), min_size=1, max_size=8)


@settings(max_examples=30, deadline=None)
@given(WEIGHTS)
def test_shares_at_every_prefix(weights):
    counts = whole_weights(weights)
    source, earlier = interleave(counts)
    given_so_far = np.zeros((len(source) + 1, len(weights)), dtype=np.int64)
    np.add.at(given_so_far, (np.arange(1, len(source) + 1), source), 1)
    given_so_far = given_so_far.cumsum(0)
    shares = np.array([float(Fraction(str(w)) / sum(Fraction(str(v)) for v in weights)) for w in weights])
    assert np.abs(given_so_far - np.outer(np.arange(len(source) + 1), shares)).max() < 1 - 1e-9
    assert given_so_far[-1].tolist() == counts  # so that every later period begins without a debt
    assert (earlier == given_so_far[np.arange(len(source)), source]).all()


def test_weights_too_fine_are_rounded():
    """Token counts as weights have no short period; shares move by less than two parts in LONGEST_PERIOD."""
    weights = [123_456_789.0, 987_654_321.0, 5.0, 1_000_003.0]
    counts = whole_weights(weights)
    assert all(count >= 1 for count in counts)
    assert sum(counts) <= LONGEST_PERIOD + len(weights)
    assert all(
        abs(c / sum(counts) - w / sum(weights)) < 2 / LONGEST_PERIOD for c, w in zip(counts, weights, strict=True)
    )


@pytest.fixture
def blend(counting) -> Blend:
    files = [counting("a", 51), counting("b", 36, first=1000), counting("c", 501, first=2000)]
    dataset, _ = build(
        config({file.prefix: weight for file, weight in zip(files, (0.5, 0.3, 0.2), strict=True)}), seed=1
    )
    assert isinstance(dataset, Blend)
    return dataset


def test_blend_is_each_dataset_in_its_own_order(blend):
    samples = first_tokens(blend, 400)
    for first, length, share in ((0, 10, 0.5), (1000, 7, 0.3), (2000, 100, 0.2)):
        own = [t for t in samples if first <= t < first + 1000]
        assert len(own) == 400 * share
        assert own == [first + i % length * S for i in range(len(own))]


def test_blend_from_any_index(blend):
    """Random access equals the sequence, also far beyond what could be replayed."""
    counts = Counter()
    for k in range(200):
        source, sample = blend.locate(k)
        assert sample == counts[source]
        counts[source] += 1
    for k in range(10):
        source, sample = blend.locate(k)
        assert blend.locate(10**15 + k) == (source, sample + 10**14 * (5, 3, 2)[source])


def test_blend_epoch_ends_before_any_repeat(blend):
    seen = [blend.locate(k) for k in range(blend.samples_per_epoch + 1)]
    lengths = (10, 7, 100)
    assert all(sample < lengths[source] for source, sample in seen[:-1])
    assert seen[-1][1] == lengths[seen[-1][0]]


@pytest.mark.parametrize("train", ["one", "list", "blend"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_split_is_disjoint_and_whole(counting, train, shuffle):
    a, b = counting("a", 301), counting("b", 401, first=1000)
    source = {"one": a.prefix, "list": [a.prefix, b.prefix], "blend": {a.prefix: 3, b.prefix: 1}}[train]
    training, validation = build(config(source, validation=0.1, shuffle=shuffle), seed=1)
    assert validation is not None
    trained = {int(t) for i in range(4 * training.samples_per_epoch) for t in read(training, i)}
    held = [int(t) for i in range(validation.samples_per_epoch) for t in validation[i].tokens]
    assert not trained & set(held)
    assert held == sorted(set(held)), "each held-out sample once, in order"
    cut_a, cut_b = 273, 1000 + 364  # the first document (of 7 tokens) at or after 90%
    tail = [*range(cut_a, 301), *([] if train == "one" else range(cut_b, 1401))]
    assert held == tail[: (len(tail) - 1) // S * S]


def test_split_inside_a_single_document(counting):
    file = counting("x", 1001, document=2000)
    training, validation = build(config(file.prefix, validation=0.1), seed=1)
    assert validation is not None
    assert (training.samples_per_epoch, validation.samples_per_epoch) == (180, 19)
    assert int(validation[0].tokens[0]) == 901


def test_validation_files(counting):
    a, b = counting("a", 301), counting("b", 51, first=1000)
    training, validation = build(config(a.prefix, validation=b.prefix, shuffle=True), seed=1)
    assert validation is not None
    assert training.samples_per_epoch == 60
    assert first_tokens(validation, 10) == list(range(1000, 1050, S)), "validation is never shuffled"


def test_fingerprint_follows_content_and_order(counting, write):
    prefix = counting("x", 401).prefix
    other = counting("y", 401, first=1).prefix

    def of(train=prefix, seed=1, **options) -> str:
        return build(config(train, shuffle=options.pop("shuffle", True), **options), seed)[0].fingerprint

    variants = [
        of(),
        of(seed=2),
        of(shuffle=False),
        of(sequence_length=6),
        of(validation=0.1),
        of(train=other),
        of(train=[prefix, other]),
        of(train=[other, prefix]),
        of(train={prefix: 1, other: 1}),
        of(train={prefix: 2, other: 1}),
    ]
    assert len(set(variants)) == len(variants)
    assert of() == of()
    assert of(shuffle=False, seed=1) == of(shuffle=False, seed=2), "the seed has no part in an unshuffled order"
    assert of(train={prefix: 2, other: 1}) == of(train={prefix: 4, other: 2}), "nor has the scale of weights"


BAD = {
    "missing": (lambda a, b: {"train": "nowhere/x"}, "nowhere/x.idx is missing"),
    "too short": (lambda a, b: {"train": a, "sequence_length": 300}, "data.sequence_length = 300 needs 301 tokens"),
    "nothing held out": (lambda a, b: {"train": a, "validation": 0.01}, "larger held-out fraction"),
    "missing validation": (lambda a, b: {"train": a, "validation": "nowhere/x"}, "nowhere/x.idx is missing"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_data(counting, options, message):
    a, b = counting("a", 100).prefix, counting("b", 100).prefix
    with pytest.raises(DataError, match=message):
        build(config(**options(a, b)), seed=1)


@pytest.mark.parametrize("mix", [list, lambda prefixes: dict.fromkeys(prefixes, 1.0)], ids=["list", "blend"])
def test_two_tokenizers_do_not_mix(counting, mix):
    a, b = counting("a", 100).prefix, counting("b", 100).prefix
    Path(f"{b}.json").write_text(json.dumps({"vocab_size": 101, "eos": 99}))
    with pytest.raises(DataError, match="different values of vocab_size: 100, 101"):
        build(config(mix([a, b])), seed=1)


def test_access_touches_only_its_sample(counting):
    """Reading a sample of a file costs the same wherever it lies: a slice, no scan. The tokens stay memory-mapped."""
    file = counting("x", 501)
    dataset = Concatenation([TokenRange(file, 0, 501)], S, shuffle=True, seed=1)
    assert isinstance(file.tokens, np.memmap)
    assert dataset[10**18].tokens.shape == (S,)
