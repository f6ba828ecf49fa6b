"""Gradients of parameters as actions of their own (``W``)."""
