"""SMP v1 as scripts know it: its names, what each of them is worth here, and the package of its name.

``names`` is data; ``missing`` makes the names that are not built yet, ``port`` reads scripts by it, ``table``
writes the README's table from it. ``alias`` puts the package ``smdistributed``, which lies in
``smp_lite/on_path``, before scripts; ``cuda_as_cpu``, for those that speak of CUDA, alone imports torch.
"""
