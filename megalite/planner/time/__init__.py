"""The time of a training step under one layout."""
