"""Indexed arrays of a shell: elements by index, some of which can be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class IndexedArray:
    """An indexed array. It is never changed in place: states of the shell share it.

    Attributes:
        by_index: index → element, in ascending order of the indices.
    """

    by_index: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, elements: Iterable[str]) -> IndexedArray:
        return cls(dict(enumerate(elements)))

    def __bool__(self) -> bool:
        return bool(self.by_index)

    @property
    def elements(self) -> list[str]:
        """The elements without the missing ones."""
        return [*self.by_index.values()]

    @property
    def end(self) -> int:
        """The index after the last element: NAME+=(…) appends there, and negative indices count from it."""
        return max(self.by_index, default=-1) + 1

    def place(self, index: int) -> int:
        """Return an index from the beginning."""
        return index if index >= 0 else self.end + index

    def get(self, index: int) -> str | None:
        return self.by_index.get(self.place(index))

    def with_elements(self, others: Mapping[int, str]) -> IndexedArray:
        """Return the array after assignments to elements."""
        return IndexedArray(dict(sorted({**self.by_index, **others}.items())))

    def without(self, index: int) -> IndexedArray:
        """Return the array after `unset NAME[index]`."""
        removed = self.place(index)
        return IndexedArray({place: text for place, text in self.by_index.items() if place != removed})

    def slice(self, first: int, count: int | None) -> list[str]:
        """Return ${NAME[@]:first:count}: `count` of the elements with an index of at least `first`."""
        start = self.place(first)
        if start < 0:
            return []
        return [text for place, text in self.by_index.items() if place >= start][:count]
