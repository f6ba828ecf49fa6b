"""BERT: its layers and its encoder."""

from __future__ import annotations

from .encoder import NAMES
from .names import StateDict

__all__ = ["translate_hf_state_dict_to_smdistributed_bert", "translate_state_dict_to_hf_bert"]


def translate_state_dict_to_hf_bert(state_dict: StateDict, max_seq_len: int | None = None) -> StateDict:
    """From ``smp.nn``'s names to those of a ``Bert...`` model, whatever is around its encoder.

    Args:
        state_dict: whole tensors.
        max_seq_len: taken as it is for the other models; there are no masks here.
    """
    return NAMES.to_hf(state_dict)


def translate_hf_state_dict_to_smdistributed_bert(
    state_dict: StateDict, max_seq_len: int | None = None
) -> StateDict:
    """The reverse."""
    return NAMES.to_smp(state_dict)
