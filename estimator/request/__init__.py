"""A job before it is sent: its distribution checked, its launch rehearsed, the package packed with it."""
