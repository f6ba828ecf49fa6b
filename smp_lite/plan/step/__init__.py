"""One step as data: segments, actions, transfers, and a simulator that plays them."""
