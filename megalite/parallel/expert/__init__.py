"""Expert parallelism: how the rows of tokens reach their experts and come back, and the experts' matmuls.

Start with dispatch.py; `megalite.model.blocks.mixture` chooses the experts (choice.py holds its choice).
"""
