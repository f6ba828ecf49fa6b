"""Wording: a pydantic failure as the SDK would have put it, and a field as a row of a table.

Which text belongs to a field follows from its type: counts, switches and choices each have one.
Only the few fields with a text of their own are listed by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from smp_lite.config.errors import complaint

__all__ = ["default_text", "explain", "type_text"]

#: Defaults that depend on other parameters.
_DEPENDENT_DEFAULTS = {
    "partitions": "required",
    "pipeline_parallel_degree": "partitions",
    "active_microbatches": "partitions + 2; interleaved_virtual and auto: at least 2 x partitions",
    "virtual_stages": '1; 2 if pipeline is "interleaved_virtual", "v" if "zero_bubble_v", chosen if "auto"',
    "memory_weight": '0.2 if optimize is "speed", else 0.8',
}

#: Text and way out of a wrong type, for the fields that share theirs with no other.
_OWN_TEXTS = {
    "partition_file": ("'partition_file' must be a str.", "write the path as a string"),
    "default_partition": (
        "default_partition must be an integer.",
        "write the index of a partition, without quotes",
    ),
    "virtual_stages": (
        "virtual_stages must be a positive integer or 'v'.",
        "write the number of pieces of a partition without quotes, or 'v' for two, there and back",
    ),
    "memory_weight": (
        "memory_weight must be between 0.0 and 1.0!",
        "write a number, without quotes",
    ),
    "memory_limit": (
        "memory_limit must be a positive number of bytes.",
        "write a whole number, or a text such as '3 GiB' (KiB, MiB, GiB, TiB, KB, MB, GB, TB)",
    ),
    "ddp_port": (
        "Invalid port number {value}.",
        "write an integer from 0 to 65535, without quotes",
    ),
}


def explain(error: ValidationError, given: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> str:
    """Returns the text of the first failure among the parameters that the user wrote.

    A value that was copied (``pipeline_parallel_degree`` to ``partitions``) fails twice, and is
    told under the key it was written with.
    """
    for failure in error.errors():
        if not failure["loc"]:
            return str(failure["ctx"]["error"])
        name = str(failure["loc"][0])
        if name in given:
            text, way_out = _text_and_way_out(name, given[name], fields[name])
            return complaint(text, name, given[name], way_out)
    raise AssertionError(f"no failure of a given parameter in {error}")


def _text_and_way_out(name: str, value: object, field: FieldInfo) -> tuple[str, str]:
    if name in _OWN_TEXTS:
        text, way_out = _OWN_TEXTS[name]
        return text.format(value=value), way_out
    if name == "placement_strategy":
        return (
            f"{name} must be a value in: ['spread', 'cluster'].",
            "write one of these, or an order of the letters D, P and T such as 'DPT'",
        )
    if get_origin(field.annotation) is Literal:
        return (
            f"{name} must be a value in: {list(get_args(field.annotation))}.",
            "write one of these",
        )
    if field.annotation is float:
        return (f"{name} must be a number of 0 or more.", "write a number, without quotes")
    if any(isinstance(bound, Ge) and bound.ge == 0 for bound in field.metadata):
        return (f"{name} must be a whole number of 0 or more.", "write it without quotes")
    if field.annotation is bool:
        return (
            f"{name} must be a value in: [True, False].",
            "write True or False (in JSON true or false), without quotes",
        )
    return (
        f"The number of {name} must be a positive integer.",
        "write a whole number of 1 or more, without quotes",
    )


def type_text(field: FieldInfo) -> str:
    """Returns the type of a field as a reader of the README wants it, for example ``int >= 1``."""
    return _type_text(field.annotation, field.metadata)


def _type_text(annotation: Any, metadata: Sequence[Any]) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) in (Union, type(int | None)):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return ", ".join(_type_text(kind, metadata) for kind in kinds)
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        metadata = [*metadata, *(bound for info in inner for bound in getattr(info, "metadata", ()))]
    bounds = "".join(f" >= {bound.ge}" for bound in metadata if isinstance(bound, Ge))
    return f"{annotation.__name__}{bounds}"


def default_text(name: str, field: FieldInfo) -> str:
    """Returns the default of a field as text; ``required`` where there is none."""
    if name in _DEPENDENT_DEFAULTS:
        return _DEPENDENT_DEFAULTS[name]
    if field.default is None:
        return "none"
    return f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
