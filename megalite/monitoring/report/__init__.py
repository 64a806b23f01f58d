"""The HTML page about one run or several: run.py reads a run's directory, page.py writes the page."""
