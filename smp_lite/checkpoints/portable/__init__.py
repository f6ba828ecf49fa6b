"""A checkpoint in pieces that any layout of ranks can read."""
