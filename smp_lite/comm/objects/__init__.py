"""Collectives on Python objects, as states that are polled: between neighbours, or by trees."""
