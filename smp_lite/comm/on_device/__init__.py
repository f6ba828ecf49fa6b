"""What ranks sum and gather on their devices: by process groups, or in each other's memory."""
