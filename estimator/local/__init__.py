"""A session that runs jobs on this machine: its client takes the service's place, its bucket that of S3."""
