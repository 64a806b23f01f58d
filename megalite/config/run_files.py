"""Names of the files in a run's directory; docs/runs.md says who writes each of them, and when."""

import re

CONFIG = "config.yaml"
METRICS, SUMMARY, STARTS = "metrics.jsonl", "summary.json", "starts.jsonl"
ENVIRONMENT, PREDICTION, FP32_MATMUL = "environment.json", "prediction.json", "fp32_matmul.json"
LOCK = "lock"
CRASH, PREVIOUS_CRASH, CRASH_PARTS = "crash.md", "crash.previous.md", ".crash"
STALLS = "stalls"
CHECKPOINTS = "checkpoints"
LATEST, BEST = "latest", "best"  # in `checkpoints`: files that name a checkpoint
MANIFEST = "manifest.json"  # in each checkpoint
ORIGIN = "origin"  # in a checkpoint whose data is, or is also, in a store: where
UNPUBLISHED = "unpublished"  # in `checkpoints`: those that never came into the store, and that the run left
STORE_STATE = "store.json"  # what a run's spool knows of its store
OFFLOAD = "offload"
TOKENIZER = "tokenizer"
TENSORBOARD = "tensorboard"
WANDB_ID, MLFLOW_ID, TRACKIO_NAME = "wandb_id", "mlflow_id", "trackio_name"
TRACES = "traces"
TIMELINE, TIMELINE_RECORDS = f"{TRACES}/timeline.json", f"{TRACES}/records.json"
REPORT = "report.html"

_STEP = re.compile(r"step_(\d{8,})")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_number(name: str) -> int | None:
    """The step in a checkpoint's name, or None if it is not the name of a step."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
