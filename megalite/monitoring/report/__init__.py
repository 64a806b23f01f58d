"""HTML page about one or several runs: run.py reads a run directory, page.py writes the page."""
