"""Plans as sentences, tables and pictures."""
