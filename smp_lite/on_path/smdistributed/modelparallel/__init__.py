"""SMP v1's name, for scripts that import it: everything below is smp_lite's own.

Importing it starts nothing. The version is that of the SMP whose interface this is; scripts compare it.
"""

__version__ = "1.15.0"
