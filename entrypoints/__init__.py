"""What runs on the host: a job as data (`LaunchPlan`), then the processes that it describes.

Decided first, done afterwards: `launch_plan` builds the whole argument list and the environment as
a pure function, `local` starts it on this machine and watches it, `rank_main` is what each process
runs first. Nothing here imports torch; a launcher that takes seconds to print a typing mistake is
a bad launcher.
"""
