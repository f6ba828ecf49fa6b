"""Plans for people: tables, and the nearest configuration of another system."""
