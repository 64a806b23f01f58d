"""A mixture of experts (MoE) in place of the dense feed-forward."""
