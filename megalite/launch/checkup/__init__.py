"""What `megalite doctor` checks: software, limits, storage, and a pair of ranks. Imports no torch: only the
ranks do, in processes of their own, so that one that hangs is ended.
"""
