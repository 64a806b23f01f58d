"""A gated short convolution."""
