"""What a plan costs before it runs: bubble, memory and messages, computed from schedules alone. Imports no torch."""
