"""Uploads of a run whose run.dir is an object store."""

from dataclasses import dataclass

from megalite.config import amounts
from megalite.config.option import POSITIVE, option
from megalite.config.rule import Rule, duration_rule


@dataclass
class StoreConfig:
    """Uploads to the object store that run.dir names. A run writes to run.spool first."""

    part_mb: float = option(32.0, POSITIVE, amount=amounts.MEGABYTES)
    """Size of the parts in which larger files are uploaded to S3, in MB. S3 accepts 5 MiB and above."""
    interval: str = option("30s", amount=amounts.DURATION)
    """How often metrics.jsonl and other files of the run that have changed are uploaded, besides before each
    checkpoint."""
    retry: str = option("1m", amount=amounts.DURATION)
    """The longest pause between two attempts while the store fails. The run goes on meanwhile."""
    final_wait: str = option("10m", amount=amounts.DURATION)
    """How long the end of a run waits for uploads. What is not in the store then stays in run.spool, and the
    run ends with an error."""
    spool_gb: float | None = option(None, POSITIVE)
    """Most gigabytes of checkpoints in run.spool that wait for the store. A save that would exceed it fails.
    null: what the disk holds."""


RULES: tuple[Rule, ...] = tuple(
    duration_rule(f"store.{key} is a duration", f"store.{key}") for key in ("interval", "retry", "final_wait")
)
