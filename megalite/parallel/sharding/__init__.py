"""The data-parallel outer group: flat buckets, their reduction, and who keeps which shard (ZeRO)."""
