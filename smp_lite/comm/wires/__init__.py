"""Wires between stages: what one is (:mod:`.wire`), its makes, and which a job takes (:mod:`.choice`)."""
