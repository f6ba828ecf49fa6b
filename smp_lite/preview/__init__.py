"""What a step would do and need, without training: ``smp-lite plan``."""
