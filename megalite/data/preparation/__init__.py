"""From texts and conversations to a token file: start at prepare.py; sources.py reads inputs, writer.py
writes."""
