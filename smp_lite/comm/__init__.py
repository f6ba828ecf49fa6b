"""Talking to other ranks: the world of processes, waits with a limit, wires between stages."""
