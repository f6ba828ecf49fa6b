"""Recording: what a step does, found without doing it. Torch, but no processes."""
