"""What a script does with its optimizer between steps, which all ranks must do alike.

Each stage's parameters are stepped by the rank that holds them, and each replica steps its own copy. So a
rate that one rank changes alone (``if smp.rank() == 0: scheduler.step()``), or a step of the optimizer that
one replica leaves out because of its own loss, would train something that no one process trains. What has
been done is a number: the ranks of a replica compare it with every step that they have recorded, and replicas
as they reduce gradients.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["BetweenSteps"]

SETTINGS = (
    *("lr", "initial_lr", "max_lr", "min_lr", "lr_decay", "momentum", "base_momentum", "max_momentum"),
    *("betas", "weight_decay", "eps", "dampening", "nesterov", "amsgrad", "maximize", "alpha", "rho"),
    "momentum_decay",
)
"""Those that scripts and schedulers set; others may be counts that an optimizer keeps itself."""

_Plain = bool | int | float | str | None


class BetweenSteps:
    """What this rank has done so far.

    Attributes:
        is_training: tells the mode of the model.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._optimizers: list[_Compared] = []
        self.is_training: Callable[[], bool] = lambda: True

    def note(self, call: str) -> None:
        """The script has called this."""
        self._calls[call] += 1

    def compare(self, optimizer: Any, *, in_stages: bool) -> None:
        """Settings of this optimizer count from now on, and no longer those of others for its parameters.

        Args:
            optimizer: has ``param_groups``.
            in_stages: on ranks of other stages as well; else among replicas alone.
        """
        new = _Compared(optimizer, in_stages)
        members = new.members()
        self._optimizers = [each for each in self._optimizers if not members & each.members()] + [new]

    def digest(self, *, in_stages: bool) -> int:
        """A number for all of it.

        Args:
            in_stages: for ranks of several stages.
        """
        done = sorted(self._calls.items()), self._settings(in_stages), self.is_training()
        return zlib.crc32(repr(done).encode())

    def lines(self, *, in_stages: bool) -> list[str]:
        """It in words, for errors."""
        calls = [f"has called {call} {count} times" for call, count in sorted(self._calls.items())]
        mode = f"has the model in {'training' if self.is_training() else 'evaluation'} mode"
        settings = self._settings(in_stages)
        whose = (
            ["the optimizer's"] if len(settings) == 1 else [f"optimizer {n}'s" for n in range(len(settings))]
        )
        return [mode, *calls] + [
            f"has {name} setting {key} of parameter group {number} at {value}"
            for name, groups in zip(whose, settings, strict=True)
            for number, group in enumerate(groups)
            for key, value in group
        ]

    def _settings(self, in_stages: bool) -> list[list[list[tuple[str, Any]]]]:
        return [each.settings() for each in self._optimizers if each.in_stages or not in_stages]


@dataclass(frozen=True)
class _Compared:
    """An optimizer whose settings are, in several stages or among replicas alone."""

    optimizer: Any
    in_stages: bool

    def members(self) -> set[int]:
        """Ids of its parameters."""
        return {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}

    def settings(self) -> list[list[tuple[str, Any]]]:
        """By group, those that are plain."""
        found = [
            [(key, group[key]) for key in SETTINGS if key in group] for group in self.optimizer.param_groups
        ]
        return [[(key, _plain(value)) for key, value in group if _is_plain(value)] for group in found]


def _plain(value: Any) -> Any:
    """1 and 1.0 are one rate, as are numpy's numbers."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _Plain)
