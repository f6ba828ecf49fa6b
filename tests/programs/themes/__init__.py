"""One file for each kind of program."""
