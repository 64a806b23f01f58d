"""A dense feed-forward, gated or not."""
