"""Self-attention with grouped key-value heads, windows, query-key norms and sinks.

Latent attention has the same operations, tables and routes, and inherits them.
"""
