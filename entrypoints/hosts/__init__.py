"""The hosts of a job: the part of each one, and how they find each other, on a network or on one machine."""
