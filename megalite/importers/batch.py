"""The batch sizes that follow from global batch = micro-batch * accumulation steps * data-parallel ranks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from megalite.config.errors import ConfigError
from megalite.importers.verdict import ImportedFile, KeyRule, Table, Verdict, honoured, lost


class Batch(NamedTuple):
    """The keys of another project: the global batch, the micro-batch of a rank, and the accumulation steps,
    which default to 1."""

    total: str
    micro: str
    steps: str

    def options(self, source: ImportedFile) -> dict[str, int]:
        """The batch sizes that are known. Raises ConfigError if they contradict each other."""
        total, micro, steps = map(source.size, self)
        if self.steps not in source.leaves | source.defaults and not (total and micro):
            steps = 1
        known = {
            name: size
            for name, size in zip((self.micro, self.steps, "ranks"), (micro, steps, source.dp), strict=True)
            if size
        }
        product, complete = math.prod(known.values()), len(known) == 3
        if total and (total != product if complete else total % product):
            right = f"{' * '.join(known)} = {' * '.join(map(str, known.values()))}"
            raise ConfigError(
                f"{self.total} = {total} is not {'' if complete else 'a multiple of '}{right}. Correct one "
                "of them."
            )
        if complete:
            total = product
        elif total and steps and source.dp and self.micro not in source.leaves:
            micro = total // product
        return {
            option: size
            for option, size in (("train.global_batch_size", total), ("train.micro_batch_size", micro))
            if size
        }

    def micro_batch(self, value: Any, source: ImportedFile) -> Verdict:
        """The verdict on the micro-batch. Where nothing else asks for the ranks, which the global batch
        depends on, this does."""
        options = {"train.micro_batch_size": value, **self.options(source)}
        requested = {self.total, self.steps} & (source.leaves | source.defaults).keys()
        if "train.global_batch_size" in options or requested:
            return honoured(options)
        return Verdict("open", options, f"set train.global_batch_size to {value} * parallel.dp")

    def accumulation(self, value: Any, source: ImportedFile) -> Verdict:
        """The verdict on the accumulation steps: the global batch, or the formula that gives it."""
        options, total, micro = self.options(source), source.size(self.total), source.size(self.micro)
        if len(options) == 2:
            return honoured(options)
        product = f"{value} * {source.dp or 'parallel.dp'}"
        whole = f"train.global_batch_size to {micro or 'train.micro_batch_size'} * {product}"
        return lost(
            "it follows from the batch sizes: set "
            f"{f'train.micro_batch_size to {total} / ({product})' if total else whole}"
        )

    def table(self) -> Table:
        """The rows of the three keys; an unused key is empty."""
        rows = {
            self.steps: KeyRule(self.accumulation, "train.global_batch_size"),
            self.micro: KeyRule(self.micro_batch, "train.micro_batch_size"),
            self.total: KeyRule(
                lambda value, source: honoured({"train.global_batch_size": value, **self.options(source)}),
                "train.global_batch_size",
            ),
        }
        return {key: row for key, row in rows.items() if key}
