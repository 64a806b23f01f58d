"""What `megalite launch` prints and submits: a run as a job of SLURM, Kubernetes, Ray or SkyPilot.

job.py is what all of them have in common: the number of nodes, and the command that a node runs, which is
`megalite train --nproc` with torchrun's rendezvous. Each other module turns a job into one kind of
specification. Imports no torch.
"""
