"""Saving and resuming, on top of the files of :mod:`smp_lite.storage`."""
