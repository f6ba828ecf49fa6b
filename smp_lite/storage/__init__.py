"""Files that survive a kill at any moment; knows torch, no processes."""
