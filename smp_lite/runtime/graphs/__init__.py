"""Segments of a replayed step (``static_mode``) that a device runs as graphs, without their Python."""
