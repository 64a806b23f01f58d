"""The time that one microbatch takes on one rank, part by part of the model."""
