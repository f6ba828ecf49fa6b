"""Clusters with launchers of their own: the text that Slurm or Kubernetes wants; nothing is started."""
