"""``smp-lite check``: does the user's own script give one process's numbers?

A step is run twice from the same state: the process forks when it begins. The child runs the step function as
plain torch would, every call where it stands (:mod:`.plain_run`); the parent records, cuts, schedules and
executes it. Both note what each call got and gave (:mod:`.observe`), and the parent compares
(:mod:`.report`): losses, gradients, buffers, random state, and call by call, so that the first one that
differs can be named with its line and the likely cause.

Where several ranks share a stage, or there are replicas, real ranks run the steps and leave what they find
(:mod:`.in_ranks`); then one process runs the script with the whole model (:mod:`.dense_run`) and compares
whole values: gradients of split parameters put together (:mod:`.over_ranks`).
"""
