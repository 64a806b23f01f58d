"""What a plan costs before it runs: bubble, memory, traffic and FLOPs, computed from configurations and schedules alone. Imports no torch."""
