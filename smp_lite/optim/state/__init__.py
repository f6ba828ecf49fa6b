"""What an optimizer holds on a rank: parameters, what stands in for them while it runs, their states."""
