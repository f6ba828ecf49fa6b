"""Saves that are killed."""
