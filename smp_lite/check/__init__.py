"""``smp-lite check``: does the user's own script give one process's numbers?

A step is run twice from the same state: the process forks when it begins. The child runs the step function as
plain torch would, every call where it stands (:mod:`.plain_run`); the parent records, cuts, schedules and
executes it. Both note what each call got and gave (:mod:`.observe`), and the parent compares
(:mod:`.report`): losses, gradients, buffers, random state, and call by call, so that the first one that
differs can be named with its line and the likely cause.
"""
