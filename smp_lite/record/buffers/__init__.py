"""Buffers of modules: what code on every rank sees of them, and what calls make of them on their own rank."""
