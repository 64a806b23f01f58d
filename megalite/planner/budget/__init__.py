"""train.recompute: budget, the operations that are recomputed so that a step fits in memory."""
