"""Training jobs in containers: the container's side, and AWS's own launchers."""
