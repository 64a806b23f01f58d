"""How a message names the legal values of an option."""

import pytest

from megalite.config.rule import describe_legal

ROWS = [
    (6, [1, 2, 4, 8], "Legal values: 1, 2, 4, 8. Nearest: 4 or 8."),
    (9, [1, 2], "Legal values: 1, 2. Nearest: 2."),
    (4, [4], "Legal values: 4."),
    (float("nan"), [0.5], "Legal values: 0.5."),
    (3, range(5, 50), "Nearest: 5."),
    (3, [], ""),
    ("cosin", ["linear", "cosine"], "Legal values: linear, cosine. Nearest: cosine."),
    ("cosin", [], ""),
]


@pytest.mark.parametrize(("value", "legal", "said"), ROWS)
def test_legal_values_are_listed_and_the_nearest_named_if_there_is_one(value, legal, said):
    assert describe_legal(value, legal) == said
