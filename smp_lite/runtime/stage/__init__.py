"""What one stage does in a step: its list of actions, and what it holds of each microbatch."""
