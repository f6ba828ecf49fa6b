"""The recorder of a step, and its parts."""
