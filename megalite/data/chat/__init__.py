"""Chat data: records.py converts records to messages, template.py messages to tokens and loss mask."""
