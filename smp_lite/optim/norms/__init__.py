"""The norm of all gradients of a model, of which each rank has some."""
