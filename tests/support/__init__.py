"""What tests are made of: the pool of ranks (pool.py), the jobs that they run (jobs*.py), configurations and layouts,
processes to be killed and hung, and a device's rules on CPU tensors (device_rules.py)."""
