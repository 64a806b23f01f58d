"""The memory of each rank: states, activations and communication buffers."""
