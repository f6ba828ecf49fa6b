"""From a file, a dict or the environment to the plan that counts."""
