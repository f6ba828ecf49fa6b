"""Delayed initialization."""
