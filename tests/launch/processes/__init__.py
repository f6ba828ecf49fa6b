"""What processes of a job share, leave behind and wait for."""
