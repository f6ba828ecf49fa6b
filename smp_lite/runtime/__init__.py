"""Doing what was recorded and planned."""
