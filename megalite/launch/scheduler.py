"""The scheduler's job that this process belongs to, from its environment variables.

SLURM sets its own; the specifications of `megalite launch` set JOB and RESTARTS on other schedulers.
"""

from __future__ import annotations

import os

JOB, RESTARTS = "MEGALITE_JOB", "MEGALITE_RESTART_COUNT"


def job() -> str | None:
    """Return the name of the job, for messages; None without a scheduler."""
    if slurm := os.environ.get("SLURM_JOB_ID"):
        return f"SLURM {slurm}"
    return os.environ.get(JOB) or None


def restarts() -> int:
    """Return how often the scheduler has restarted the job."""
    return sum(int(os.environ.get(name) or 0) for name in ("SLURM_RESTART_COUNT", RESTARTS))
