"""Places of parameters in the buffers of Megatron-LM's distributed optimizer, written out by hand.

What megatron-core itself writes is in tests/components/test_megatron.py.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from megalite.interchange.megatron_buffers import bucket_sizes, slots

SIZES = [64, 100, 64]  # the last one is the first of the buffer, and each begins at a multiple of 64


@pytest.mark.parametrize(
    ("buckets", "places"),
    [
        ([256], [(0, 192, 64), (0, 64, 100), (0, 0, 64)]),
        ([164, 64], [(1, 0, 64), (0, 64, 100), (0, 0, 64)]),
        ([192, 64], [(1, 0, 64), (0, 64, 100), (0, 0, 64)]),  # ended where the next one would begin
        ([64, 192], [(1, 128, 64), (1, 0, 100), (0, 0, 64)]),
        ([200, 64], None),
        ([256, 64], None),
        ([164], None),
        ([164, 65], None),
        ([255], None),
        ([], None),
    ],
)
def test_places(buckets: list[int], places: list[tuple[int, int, int]] | None) -> None:
    assert slots(SIZES, buckets) == places


@pytest.mark.parametrize(
    ("alone", "limit", "buckets"),
    [
        ((), None, [256]),
        ((), 150, [164, 64]),
        ((), 64, [64, 100, 64]),
        ((0,), None, [192, 64]),
        ((2,), None, [64, 192]),
    ],
)
def test_buckets(alone: Collection[int], limit: int | None, buckets: list[int]) -> None:
    assert bucket_sizes(SIZES, alone, limit) == buckets
    assert slots(SIZES, buckets) is not None
