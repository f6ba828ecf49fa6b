"""The plan: what every rank will do, decided in plain Python (no torch) before it is done.

``topology`` says who is who. ``partitioning`` puts modules on stages, ``step`` has one step as data,
``order`` decides in which order each stage runs it, and ``choosing`` tries several of all that by simulation.
"""
