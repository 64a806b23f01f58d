"""Streams: documents in shards, tokenized while a run trains; `stream.py` is where to start."""
