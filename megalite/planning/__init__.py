"""The predicted cost of a plan: memory, traffic, kernels, links, the time of a step, and the search over
layouts.

Start with search.py or step.py. Everything is computed from configurations and schedules. May import
megalite.assembly and what is below it; imports no torch.
"""
