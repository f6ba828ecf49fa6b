"""``@smp.step``: one call of a step function, from batch to outputs."""
