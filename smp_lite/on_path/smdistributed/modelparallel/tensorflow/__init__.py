"""SMP v1 for TensorFlow, which is not here."""

raise ImportError(
    "smdistributed.modelparallel.tensorflow: smp_lite is for PyTorch, smdistributed.modelparallel.torch"
)
