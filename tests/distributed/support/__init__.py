"""What the proofs on real ranks are made of: the pool of ranks (pool.py), the jobs that they run (jobs*.py),
configurations and layouts."""
