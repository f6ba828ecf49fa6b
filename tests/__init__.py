"""The tests; a package so that worker processes can import cases as `tests.<folder>.<module>`."""
