"""`smp-lite run` and what it shows."""
