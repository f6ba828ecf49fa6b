"""State that hooks of several parts of a backward share, and gradients that depend on it.

A list of norms, or a count, that all hooks add to is nobody's business. But where what one hook adds makes
the gradient that another gives, both have to run in the order of one process: first all of one microbatch's
backward, from its end, and then the next one's. Each stage runs its own parts in that order, as long as it
has one a microbatch. Parts of different stages run at the same time, and may be on several ranks; where a
stage is visited again within a microbatch, other microbatches come in between. So what a part changes, and
hooks of another part change gradients by, is an error.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Hashable, Iterator
from typing import Any

from ...errors import SMPError
from ..code.copies import Copy
from ..code.readers import Readers
from .functions import functions_in, may_change_gradients
from .part import Owners, Part

__all__ = ["SharedState", "name_in"]

_Codes = tuple[types.CodeType, ...]


class SharedState:
    """The hooks of a step, and what they use."""

    def __init__(self) -> None:
        self._lasting: dict[_Codes, Any] = {}  # what is met once, and runs in every step
        self._hooks: dict[int | None, dict[int, tuple[Any, Owners]]] = {}  # by stage and id
        self._changing: dict[int | None, list[tuple[Any, Owners]]] = {}  # those that could change gradients
        self._used: dict[Hashable, tuple[Readers, Copy]] = {}  # by whose hooks use it
        self._is_repeated = False

    def begin_step(self, num_microbatches: int) -> None:
        self._is_repeated = num_microbatches > 1
        self._hooks.clear()
        if self._lasting:
            self._hooks[None] = {id(hook): (hook, frozenset()) for hook in self._lasting.values()}
        self._changing.clear()
        self._used.clear()

    def meet(self, hook: Any, stage_index: int | None, owners: Owners) -> None:
        """It will run within backwards, on that stage (None: on any), in the parts with these owners."""
        known = self._hooks.setdefault(stage_index, {})
        before = known.get(id(hook), (hook, frozenset()))[1]
        known[id(hook)] = hook, before | owners

    def keep(self, hook: Any) -> None:
        """It will run within backwards of this step and of later ones, on any stage.

        Of several with the same code the last one counts: a module may make a new one each time that it is
        looked at.
        """
        self._lasting[_codes_of(hook)] = hook
        self.meet(hook, None, frozenset())

    def before_running(self) -> None:
        """All hooks of the step are known."""
        by_code: dict[_Codes, list[Any]] = {}
        for hooks in self._hooks.values():
            for hook, _ in hooks.values():
                by_code.setdefault(_codes_of(hook), []).append(hook)
        changing = {id(hook) for alike in by_code.values() if may_change_gradients(alike) for hook in alike}
        self._used.clear()
        for stage, hooks in self._hooks.items():
            self._changing[stage] = [entry for key, entry in hooks.items() if key in changing]
            if self._changing[stage]:
                self._look(stage, [hook for hook, _ in self._changing[stage]])

    def _look(self, key: Hashable, hooks: list[Any]) -> None:
        users = Readers(None, ())
        for hook in hooks:
            users.add_user(hook)
        self._used[key] = users.complete(), users.copy()

    @contextlib.contextmanager
    def watched(self, part: Part) -> Iterator[None]:
        """Within: a part runs.

        Raises:
            SMPError: it has changed what hooks of others use.
        """
        others: list[Hashable] = [stage for stage in self._hooks if stage != part.stage_index]
        if self._is_repeated and part.elsewhere and self._changing.get(part.stage_index):
            visit = (part.stage_index, part.here, part.elsewhere)
            if visit not in self._used:
                self._look(
                    visit, [h for h, of in self._changing[part.stage_index] if not part.has_all_of(of)]
                )
            others.append(visit)
        others = [key for key in others if key in self._used]
        for key in others:
            users, copy = self._used[key]
            if copy.changed() is not None:
                self._used[key] = users, users.copy()
        yield
        for key in others:
            if (text := self._used[key][1].changed()) is not None:
                raise _error(name_in(text), part, in_other_visit=isinstance(key, tuple))


def _codes_of(hook: Any) -> _Codes:
    return tuple([function.__code__ for function in functions_in(hook)])


def name_in(text: str) -> str:
    """S of "changes S, a list"."""
    return text.partition(" ")[2].partition(",")[0]


def _error(name: str, part: Part, *, in_other_visit: bool) -> SMPError:
    if in_other_visit:
        whose, why = (
            "of another part of the model on that stage",
            "these parts do not run one after the other for each microbatch: set virtual_stages to 1, or "
            "place them side by side, or l",
        )
    else:
        whose, why = (
            "of other stages",
            "stages run their backwards at the same time, and may be on several ranks, so it would not "
            "become what it becomes in one process. L",
        )
    return SMPError(
        f"{name} is changed by code that runs within a backward (a hook, an autograd function's backward) on "
        f"stage {part.stage_index}, and used by such code that changes gradients {whose}: {why}et each hook "
        "have a place of its own"
    )
