"""SMP v1 as scripts know it: its names, its package, the command that reads scripts, and whole scripts."""
