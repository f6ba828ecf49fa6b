"""Every model type of ``transformers``, tiny and random, trained by the library and by plain torch.

Not part of ``make test``: it takes hours. ``make sweep``, or for some models
``python -m tests.sweep --only bert gpt2``.
"""
