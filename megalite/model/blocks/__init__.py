"""The kinds of blocks, a room for each (`model.block_kind` lists the questions that a room answers)."""
