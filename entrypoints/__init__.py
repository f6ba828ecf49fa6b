"""What runs on the hosts: a job as data first (`LaunchPlan`), then the processes that it describes.

The files here are programs, each started by a command line; the folders are what they are made of.

    train.py           what a job's container runs
    start.py           the step before it, in an image that has no smp_lite
    sdk_v3_driver.py   the same for jobs of version 3 of the SDK
    rank_main.py       what each rank runs before it becomes the script
    host_agent.py      what mpirun runs in the place of ssh

    clusters/          Slurm and Kubernetes: a job as the text that the cluster's own launcher wants
    hosts/             a host's part of a job, and how the hosts of a job find each other
    this_machine/      the launcher: starts a plan on this machine, shows its output, ends it
    mpi/               mpirun: what to start as one command line, and what mpirun says about it
    container/         what SageMaker puts into a job's container, and what the script finds there

Each folder imports only from those below it, and `clusters` from none. Nothing here imports torch; a
launcher that takes seconds to print a typing mistake is a bad launcher.
"""
