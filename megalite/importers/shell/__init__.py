"""The commands that a shell script starts, and the words that they get."""
