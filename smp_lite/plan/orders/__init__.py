"""Orders written down for the shapes of the literature, and the choice among orders by simulation."""
