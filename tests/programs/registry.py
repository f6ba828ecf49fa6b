"""The list of programs, and how each is to be run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Program", "program", "programs"]

_registered: dict[str, Program] = {}


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: ``theme.function``.
        function: ``(smp, out) -> None``.
        stages: numbers of partitions to try in one process.
        ranks: numbers of partitions to try with a real process each.
        replicas: data-parallel degrees to try with real processes; the program asks ``smp.dp_rank()``.
        microbatches: of each step.
        parameters: further SMP parameters.
        pipelines: schedules to try.
        static: also with ``static_mode``.
        tolerance: largest relative difference; 0 is to the bit. More only where what is summed differs,
            as the function's docstring says.
        refused: part of the error by which the library refuses it, where it does; else it must be equal.
        refused_static: the same for ``static_mode`` alone.
        refused_on_ranks: the same for real processes alone.
        always_on_ranks: also in ``make test``: nothing else shows there what it is about.
        slow: for ``make test-all`` only.
    """

    name: str
    function: Callable[[Any, Any], None]
    stages: tuple[int, ...] = (2,)
    ranks: tuple[int, ...] = ()
    replicas: tuple[int, ...] = (1,)
    microbatches: int = 2
    parameters: tuple[tuple[str, Any], ...] = ()
    pipelines: tuple[str, ...] = ("interleaved",)
    static: bool = False
    tolerance: float = 0.0
    refused: str = ""
    refused_static: str = ""
    refused_on_ranks: str = ""
    always_on_ranks: bool = False
    slow: bool = False


def program(**options: Any) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    """Registers a function; the options are the attributes of :class:`Program`."""
    parameters = tuple(sorted(options.pop("parameters", {}).items()))

    def register(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        assert name not in _registered, f"two programs are called {name}"
        _registered[name] = Program(name=name, function=function, parameters=parameters, **options)
        return function

    return register


@cache
def programs() -> dict[str, Program]:
    """All of them by name; imports the themes."""
    folder = Path(__file__).parent / "themes"
    for module in pkgutil.iter_modules([str(folder)]):
        importlib.import_module(f"tests.programs.themes.{module.name}")
    return _registered
