"""Configurations of five systems, compiled to one plan."""
