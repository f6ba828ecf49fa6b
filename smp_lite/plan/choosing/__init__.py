"""Which shape of stages and which schedule, by simulation."""
