"""Gradients over the ranks that contribute to them."""
