"""What a plan costs before it runs: bubble, memory, traffic, FLOPs, time, computed from configurations and schedules alone. No torch."""
