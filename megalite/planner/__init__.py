"""The planner: memory and time of a run under any layout, and the search for the fastest one.

Everything is computed from configurations and schedules. May import megalite.assembly and what
is below it; free of torch.
"""
