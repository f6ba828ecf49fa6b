"""Other ways to start ranks: clusters, torchrun, by hand."""
