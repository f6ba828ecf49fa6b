"""Optimizers and what goes with them: norms and closures over the whole model."""
