"""Names of the files in a run's directory; docs/runs.md says who writes each of them, and when."""

CONFIG = "config.yaml"
METRICS, SUMMARY, STARTS = "metrics.jsonl", "summary.json", "starts.jsonl"
ENVIRONMENT, PREDICTION, FP32_MATMUL = "environment.json", "prediction.json", "fp32_matmul.json"
LOCK = "lock"
CRASH, PREVIOUS_CRASH, CRASH_PARTS = "crash.md", "crash.previous.md", ".crash"
STALLS = "stalls"
CHECKPOINTS = "checkpoints"
LATEST, BEST = "latest", "best"  # in `checkpoints`: files that name a checkpoint
MANIFEST = "manifest.json"  # in each checkpoint
OFFLOAD = "offload"
TOKENIZER = "tokenizer"
TENSORBOARD = "tensorboard"
WANDB_ID, MLFLOW_ID, TRACKIO_NAME = "wandb_id", "mlflow_id", "trackio_name"
TRACES = "traces"
TIMELINE, TIMELINE_RECORDS = f"{TRACES}/timeline.json", f"{TRACES}/records.json"
REPORT = "report.html"
