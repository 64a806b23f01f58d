"""Pictures and tables of schedules: timelines as SVG, PNG, HTML, text and traces. Imports no torch, and
matplotlib only for PNG."""
