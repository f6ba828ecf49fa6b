"""An optimizer's state where parameters of other stages are in its groups."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ...errors import SMPError
from ...record.parameters.away import is_away

__all__ = ["StateHere"]


class StateHere(defaultdict[Any, Any]):
    """An optimizer's state, of this rank's parameters.

    What a script does to all states (to empty them, to set them anew) each rank does to its own; what it
    wants to know of another stage's is an error, and not as if there were none.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._away: dict[Any, _Elsewhere] = {}

    def __getitem__(self, key: Any) -> Any:
        if is_away(key):
            return self._away.setdefault(key, _Elsewhere(key))
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if is_away(key):
            self[key].clear()
            self[key].update(value)
        else:
            super().__setitem__(key, value)

    def __contains__(self, key: Any) -> bool:
        if is_away(key):
            raise _elsewhere(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if is_away(key) else super().get(key, default)

    def __len__(self) -> int:
        raise SMPError(
            "len(optimizer.state): this rank holds the state of its own stage's parameters alone. "
            "optimizer.state_dict() is the whole state"
        )

    def __bool__(self) -> bool:
        return any(True for _ in self)


class _Elsewhere(dict[str, Any]):
    """The state of another stage's parameter: what a script itself has put there, and no more."""

    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self._parameter = parameter

    def __missing__(self, key: str) -> Any:
        raise _elsewhere(self._parameter)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        raise _elsewhere(self._parameter)

    def __len__(self) -> int:
        raise _elsewhere(self._parameter)


def _elsewhere(parameter: Any) -> SMPError:
    return SMPError(
        f"optimizer.state of the parameter {parameter.smp_name!r} is on stage {parameter.smp_stage}, in "
        "another process: go by model.local_parameters(), or take optimizer.state_dict(), the whole state"
    )
