"""What ranks sum and gather on devices: through NCCL, each other's memory, or the host's."""
