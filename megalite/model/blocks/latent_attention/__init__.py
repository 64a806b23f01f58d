"""Multi-head latent attention (MLA): keys and values are computed from a narrow latent of each token."""
