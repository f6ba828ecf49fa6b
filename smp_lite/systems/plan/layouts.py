"""What a mode of tensor parallelism makes of the tensors of a layer.

Weights in torch's order, [out, in]; ``GPT-2``'s ``Conv1D`` stores [in, out]. Sources: Megatron-LM for 1d, the
SUMMA, Tesseract and 3-D papers that Colossal-AI cites for the others. With the axes of
:mod:`.colossal`, a product Y = X W with W [in, out] has

====  ==============================  ===================================  ========================
mode  W                               bias, norm                           embedding [vocab, hidden]
====  ==============================  ===================================  ========================
1d    out (column) or in (row)        bias with out; norm whole            vocab
2d    in over rows, out over columns  over columns, then rows              hidden: columns, then rows
2.5d  as 2d, the same at each depth   as 2d                                as 2d
3d    in over output, weight; out     bias over input; norm over output    hidden over output
      over input
====  ==============================  ===================================  ========================

In 3d the roles of input and output change places from one layer to the next; shapes stay the same.
"""

from __future__ import annotations

from .parallel_plan import TensorMode

__all__ = ["kind_of_class", "layout_of"]

Dims = tuple[tuple[str, ...], ...]
_ROW_STYLES = ("rowwise", "local_rowwise", "rowwise_rep")


def kind_of_class(class_name: str) -> str:
    """Returns ``linear``, ``linear_in_out`` (weights [in, out]), ``embedding``, ``norm`` or ``other``."""
    if class_name == "Conv1D":
        return "linear_in_out"
    if class_name == "NonDynamicallyQuantizableLinear":
        return "other"  # of torch's attention, which reads its weight and does not call it
    if class_name.endswith("Linear"):
        return "linear"
    if class_name.endswith("Embedding"):
        return "embedding"
    return "norm" if "Norm" in class_name else "other"


def layout_of(tensor: TensorMode, kind: str, leaf: str, rank: int, style: str = "") -> tuple[Dims, str]:
    """Returns the axes of each dimension of a tensor, and a word for the layout.

    Args:
        tensor: the mode.
        kind: of the module that holds it (:func:`kind_of_class`).
        leaf: last part of its name, ``weight`` or ``bias``.
        rank: number of its dimensions.
        style: of the module in the model's own plan, such as ``rowwise``.
    """
    whole: Dims = ((),) * rank
    found = _named_layout(tensor, kind, leaf, style)
    if found is None or len(found[0]) != rank:
        return whole, "whole"
    dims, word = found
    if kind == "linear_in_out" and rank == 2:
        dims = (dims[1], dims[0])
    return dims, word


def _named_layout(tensor: TensorMode, kind: str, leaf: str, style: str) -> tuple[Dims, str] | None:
    if leaf not in ("weight", "bias") or tensor.mode in (None, "sequence", "rules", "smp") or kind == "other":
        return None
    is_linear = kind.startswith("linear")
    if tensor.mode == "enflame":
        if not is_linear:
            return None
        return _column_or_row(leaf, is_row=tensor.sharding_dim == 0, words=("outputs", "inputs"))
    if tensor.mode == "1d":
        if kind == "norm":
            return None
        if kind == "embedding":
            by_features = style in ("embedding_colwise", "embedding_heads")
            return (((), ("tp",)), "1d features") if by_features else ((("tp",), ()), "1d vocab")
        is_row = style in _ROW_STYLES
        return _column_or_row(leaf, is_row=is_row, words=("1d column", "1d row"))
    if tensor.mode in ("2d", "2.5d"):
        split = ("tp_col", "tp_row")
        if leaf == "bias" or kind == "norm":
            return (split,), f"{tensor.mode} vector"
        return ((), split) if kind == "embedding" else (("tp_col",), ("tp_row",)), f"{tensor.mode} block"
    if leaf == "bias" and is_linear:
        return (("tp_in",),), "3d vector"
    if kind == "norm":
        return (("tp_out",),), "3d vector"
    return ((), ("tp_out",)) if kind == "embedding" else (("tp_in",), ("tp_out", "tp_w")), "3d block"


def _column_or_row(leaf: str, *, is_row: bool, words: tuple[str, str]) -> tuple[Dims, str] | None:
    if leaf == "bias":
        return None if is_row else ((("tp",),), words[0])
    return (((), ("tp",)), words[1]) if is_row else ((("tp",), ()), words[0])
