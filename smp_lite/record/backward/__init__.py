"""Python code that runs within backwards: what it reads, what it changes, what it sees."""
