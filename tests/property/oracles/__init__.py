"""The planner as it was before it was made fast, rescanning everything: what the fast one must equal."""
