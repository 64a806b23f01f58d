"""What a plan costs before it runs: memory, traffic, kernels, links, the time of a step, and the search over layouts.

Start with search.py or step.py; computed from configurations and schedules alone. May import megalite.build and what is below. No torch.
"""
