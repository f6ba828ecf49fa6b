"""What the keys of each system mean."""
