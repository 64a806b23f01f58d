"""Chat data: records → messages (records.py) → tokens and loss mask (template.py)."""
