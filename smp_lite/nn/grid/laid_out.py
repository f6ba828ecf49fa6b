"""The base of layers whose parameters are parts of a dense layer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from torch import nn

from ..keeping import KeepsLayouts, digest_of_whole
from ..layout import ParameterLayout, part_of, whole_of

__all__ = ["LaidOut"]


class LaidOut(KeepsLayouts):
    """A layer that is made from a dense one, and holds this rank's parts of its parameters."""

    dense_type: ClassVar[type[nn.Module]]
    """Of what ``from_dense`` takes and ``to_dense`` gives."""

    @classmethod
    def _empty(cls) -> Self:
        layer = cls.__new__(cls)
        LaidOut.__init__(layer)
        return layer

    @classmethod
    def _check_dense(cls, dense: nn.Module) -> None:
        if not isinstance(dense, cls.dense_type):
            raise TypeError(
                f"{cls.__name__}.from_dense takes a {cls.dense_type.__name__}, got {type(dense).__name__}"
            )

    def _hold(self, dense: nn.Module, layouts: Mapping[str, ParameterLayout]) -> None:
        """Takes the parts of a dense layer's own parameters, which all ranks hold."""
        for name, parameter in dense._parameters.items():
            if parameter is None:
                self.register_parameter(name, None)
                continue
            part = nn.Parameter(part_of(parameter, layouts[name]), parameter.requires_grad)
            self.register_parameter(name, part)
            digest = digest_of_whole(parameter, layouts[name])
            self.remember({name: layouts[name]}, None if digest is None else {name: digest})
        self.train(dense.training)

    def _give(self, dense: nn.Module) -> None:
        """The wholes, to a dense layer of the same kind; collective."""
        for name, parameter in self._parameters.items():
            if parameter is not None:
                whole = whole_of(parameter, self.smp_layouts[name])
                setattr(dense, name, nn.Parameter(whole, parameter.requires_grad))
        dense.train(self.training)
