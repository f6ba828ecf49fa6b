"""mpirun: its options, the command line of a launch as data, and what it says about its ranks."""
