"""The model before it is cut, the same on all ranks, and how it is cut."""
