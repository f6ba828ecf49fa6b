"""Config: every parameter of the SMP API, checked before a process starts or a device is touched.

The SDK's checks let ``1`` pass for ``True`` and ``True`` for a count of one, and die of a bare
TypeError or KeyError elsewhere. Here types are checked before values, and each failure has a text.
Rules about one field live on the field (``parameters``), rules about several in ``rules``, wording in
``messages``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError, model_validator

from smp_lite.config.errors import ConfigError, complaint
from smp_lite.config.keys import is_private_hint, refuse_v2_keys, unknown_keys_text
from smp_lite.config.messages import default_text, explain, type_text
from smp_lite.config.parameters import Parameters
from smp_lite.config.rules import SHAPES, check_across_fields, check_world_size
from smp_lite.config.v1_parameters import HINTS, SINCE_1_6, LaterParameters

__all__ = ["Config"]


class Config(LaterParameters):
    """The parameters of one job. Frozen; every default is filled in.

    Raises:
        ConfigError: for the first parameter that is missing, unknown, unsupported or wrong.
    """

    def __init__(self, /, **parameters: Any) -> None:
        settled = _settle(parameters, type(self).model_fields)
        try:
            super().__init__(**settled)
        except ValidationError as error:
            raise ConfigError(explain(error, parameters, type(self).model_fields)) from None

    @model_validator(mode="after")
    def _check_across_fields(self) -> Config:
        check_across_fields(self)
        return self

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Config:
        """Checks ``parameters`` and fills in every default."""
        if not isinstance(parameters, Mapping):
            text = "The parameters must be a dictionary."
            way_out = 'write {"partitions": 2}, for example'
            raise ConfigError(complaint(text, "parameters", parameters, way_out))
        for key in parameters:
            if not isinstance(key, str):
                raise ConfigError(
                    f"unknown parameter {key!r}: a name must be a str, not {type(key).__name__}"
                )
        return cls(**parameters)

    @classmethod
    def describe(cls) -> list[tuple[str, str, str, str]]:
        """Returns name, type, default and description of each parameter that does something here, the
        required one first; those that do not are told by :mod:`smp_lite.smp_v1.table`."""
        rows = [
            (name, type_text(field), default_text(name, field), field.description or "")
            for name, field in Parameters.model_fields.items()
        ]
        return sorted(rows, key=lambda row: row[2] != "required")

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError unless ``world_size`` processes hold whole replicas of the model."""
        check_world_size(self, world_size)

    @property
    def chooses_pieces(self) -> bool:
        """Whether ``pipeline: auto`` says how many pieces of the model each partition gets."""
        cuts = self.auto_partition and self.contiguous and not self.load_partition and self.partitions > 1
        return self.pipeline == "auto" and cuts and "virtual_stages" not in self.model_fields_set

    @property
    def is_of_smp_1_6(self) -> bool:
        """Whether the parameters have a key that SMP did not know before 1.6, which named files otherwise."""
        return not SINCE_1_6.isdisjoint(self.model_fields_set)

    def hints_text(self) -> str | None:
        """One line about what was given and has no effect; None if there is nothing."""
        fields = type(self).model_fields
        given = [key for key, off in HINTS.items() if getattr(self, key) != off]
        said = [f"{key}: {str(fields[key].description).removeprefix('Hint: ')}" for key in given]
        if not self.ddp:
            of_ddp = [
                key for key in ("ddp_port", "ddp_dist_backend") if getattr(self, key) != fields[key].default
            ]
            said += [f"{key}: means nothing while ddp is False." for key in of_ddp]
        if not said:
            return None
        return f"taken as hints: {' '.join(said)}"


def _settle(parameters: Mapping[str, Any], supported: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the defaults that depend on other parameters, and drops what asks for nothing."""
    unknown = unknown_keys_text(parameters, supported)
    if "partitions" not in parameters and "pipeline_parallel_degree" not in parameters:
        way_out = unknown or "give the number of pipeline partitions, for example partitions=2"
        raise ConfigError(f"'partitions' is a required parameter. Got none: {way_out}")
    if unknown:
        raise ConfigError(unknown)
    refuse_v2_keys(parameters)

    settled = {key: value for key, value in parameters.items() if not is_private_hint(key, value)}
    settled.setdefault("partitions", settled.get("pipeline_parallel_degree"))
    settled.setdefault("pipeline_parallel_degree", settled["partitions"])
    if isinstance(settled["partitions"], int):
        # Stages that are visited v times hold up to P + (P-1)/v microbatches.
        has_visits = settled.get("pipeline") in ("interleaved_virtual", "auto")
        least = 2 * settled["partitions"] if has_visits else 0
        settled.setdefault("active_microbatches", max(settled["partitions"] + 2, least))
    is_cut_here = settled.get("auto_partition", True) and not settled.get("load_partition")
    # With auto, not given means that it is to be chosen.
    if is_cut_here and settled["partitions"] != 1 and settled.get("pipeline") != "auto":
        settled.setdefault("virtual_stages", SHAPES.get(str(settled.get("pipeline")), 1))
    settled.setdefault("memory_weight", 0.2 if settled.get("optimize") == "speed" else 0.8)
    return settled
