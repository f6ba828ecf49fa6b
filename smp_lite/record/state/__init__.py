"""The state around a call that is neither argument nor parameter: torch's, Python's, random numbers."""
