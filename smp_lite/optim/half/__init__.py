"""Training in half precision: loss scaling and what belongs to it."""
