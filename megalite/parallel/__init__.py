"""How one model spreads over many ranks: parameter specs, collectives, and the tensor, pipeline and data-parallel (sharding) axes."""
