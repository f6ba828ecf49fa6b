"""The plan: what every rank will do, decided in plain Python (no torch) before it is done."""
