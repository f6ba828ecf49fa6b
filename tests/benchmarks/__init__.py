"""What the library costs, one file for each claim; `python -m tests.benchmarks` prints tables.

The machine is noisy and shared, so nothing here asserts a time. What is compared alternates within
one run, pair by pair, and a table shows the median of the pairs' ratios with their quartiles.
Processes are the test harness's, which mpirun starts.
"""
