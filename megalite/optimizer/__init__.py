"""AdamW over shards, learning-rate schedules, gradient norm and clipping."""
