"""``smp-lite port``: what a script takes from SMP v1, and what becomes of it here.

``files`` opens scripts and notebooks; ``scopes`` and ``dicts`` know what names and dictionaries stand for;
``reader`` finds what a script takes from SMP; ``judging`` and ``judging_parameters`` say what becomes of it;
``command`` shows it. Nothing is run and nothing here imports torch.
"""
