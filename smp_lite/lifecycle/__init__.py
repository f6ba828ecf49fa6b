"""A session's beginning and end: ``smp.init()``, what all ranks must agree on, and ``smp.should_stop()``.

It knows most of the package; only what starts sessions of its own (``check``, ``preview``) knows it.
"""
