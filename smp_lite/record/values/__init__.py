"""Values, and the arguments and results that hold them: what passes between calls."""
