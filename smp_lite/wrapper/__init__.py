"""``smp.DistributedModel``: partition, state dicts, the whole model for a while."""
