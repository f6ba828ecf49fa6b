"""The state of a model in parts: state dicts, what waits to be put in place, the whole for a while."""
