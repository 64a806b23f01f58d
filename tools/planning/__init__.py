"""What a plan costs before it runs: bubble, memory, traffic, FLOPs, computed from configurations and schedules alone. No torch."""
