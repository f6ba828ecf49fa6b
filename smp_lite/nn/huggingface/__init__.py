"""transformers' models on distributed modules: how each is replaced, and translators of state dicts.

Names as scripts of SMP v1 import them, with the spellings of all its releases. Written for transformers 5;
the state dicts are those of 4 as well.
"""

from __future__ import annotations

from . import bert, gpt2, gptj, gptneo, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
