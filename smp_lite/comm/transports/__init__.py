"""Messages, groups and wires between the processes of a job, whoever started them: over MPI, or a store."""
