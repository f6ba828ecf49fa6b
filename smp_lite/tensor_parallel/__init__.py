"""What makes an ordinary model's modules parts of a stage of several ranks.

SMP's marks and registry, the plans of other systems, and ``smp.parallelize``; all before the partition.
"""
