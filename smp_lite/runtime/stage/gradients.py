"""Gradients of parameters, segment by segment.

Autograd adds to ``parameter.grad`` as each segment's backward runs. Where one microbatch uses a parameter
in several segments (tied embeddings, a module called three times across stages), their gradients are first
summed by themselves and then added, as one backward over the whole graph would: that keeps the bits. So a
segment's backward is given what later ones have found, and adds its own to that use by use. What
several ``model.backward`` calls give is added call by call, in their order, whichever segment ran first. This
module also knows which backward is a parameter's last one in the step, which is when its reduction over
the data-parallel group may start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...plan.order.schedules import Work
from ...plan.step.actions import Action, ActionKind
from ...plan.step.segments import Segment
from ...record.commands.recording import Recording
from ...record.parameters.placement import Placement


class GradientBooks:
    """The books of one stage for one step.

    Args:
        placement: finds live parameters.
        on_final: called with each parameter as soon as its gradient is whole.
        deferred: ids of the parameters of which backwards leave the gradients for later, in this list.
    """

    def __init__(
        self,
        placement: Placement,
        on_final: Callable[[nn.Parameter], None] | None = None,
        deferred: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.placement = placement
        self.on_final = on_final
        self._deferred = deferred
        self._module_parameters: dict[int, list[nn.Parameter]] = {}
        self._shared: dict[tuple[int, int], list[nn.Parameter]] = {}
        self._goes_on: set[tuple[int, int]] = set()
        self._final: dict[tuple[int, int], list[nn.Parameter]] = {}
        self._left: dict[tuple[int, int], int] = {}  # (microbatch, parameter) -> segments to come
        self._partial: dict[tuple[int, int], dict[int, torch.Tensor | None]] = {}  # by backwards
        self._aside: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def plan(
        self,
        works: Sequence[Work],
        recordings: dict[int, Recording],
        actions: Sequence[Action],
        stage_index: int,
        *,
        last_batch: bool,
    ) -> None:
        """Looks up which backward touches which parameter in a batch of work."""
        self._final.clear()
        graphs = {work.microbatch_index: work.graph for work in works}
        segments = {
            (id(graph), segment.visit): segment
            for graph in {id(graph): graph for graph in graphs.values()}.values()
            for segment in graph.segments
            if segment.stage_index == stage_index
        }
        touched: dict[tuple[int, int], list[nn.Parameter]] = {}
        same: dict[tuple[int | str, ...], list[nn.Parameter]] = {}
        known: dict[tuple[int, int], list[nn.Parameter]] = {}
        for action in actions:
            if action.kind is not ActionKind.BACKWARD:
                continue
            m = action.microbatch_index
            segment = segments[id(graphs[m]), action.visit]
            # Most microbatches run the same modules: those look their parameters up together.
            key = (recordings[m].digest, id(segment))
            if key not in known:
                owners = _owners(recordings[m], segment)
                if owners not in same:
                    same[owners] = self.touched(recordings[m], segment)
                known[key] = same[owners]
            touched[m, segment.commands[0]] = known[key]
        visits = Counter(m for m, _ in touched)
        for (m, _), parameters in touched.items():
            if visits[m] > 1:
                for parameter in parameters:
                    use = (m, id(parameter))
                    self._left[use] = self._left.get(use, 0) + 1
        begun: set[tuple[int, int]] = set()
        for key, parameters in touched.items():
            shared = [p for p in parameters if self._left.get((key[0], id(p)), 0) > 1]
            if shared:
                self._shared[key] = shared
                uses = {(key[0], id(p)) for p in shared}
                if not begun.isdisjoint(uses):
                    self._goes_on.add(key)
                begun |= uses
        if last_batch and self.on_final is not None:
            seen: set[int] = set()
            for key, parameters in reversed(touched.items()):
                new = [parameter for parameter in parameters if id(parameter) not in seen]
                if new:
                    self._final[key] = new
                    seen.update(map(id, new))

    def touched(self, recording: Recording, segment: Segment) -> list[nn.Parameter]:
        """The parameters that the segment may use, as far as they want a gradient."""
        found: dict[int, nn.Parameter] = {}
        for index in segment.commands:
            command = recording.commands[index]
            if command.module is not None:
                known = self._module_parameters.get(id(command.module))
                if known is None:
                    known = self._module_parameters[id(command.module)] = list(command.module.parameters())
                for parameter in known:
                    found[id(parameter)] = parameter
            elif command.parameter is not None:
                parameter = self.placement.parameter(command.parameter)
                assert isinstance(parameter, nn.Parameter)
                found[id(parameter)] = parameter
        return [parameter for parameter in found.values() if parameter.requires_grad]

    def goes_on(self, microbatch_index: int, segment: Segment) -> bool:
        """Whether the segment's backward adds to what backwards of others have found of the microbatch."""
        return (microbatch_index, segment.commands[0]) in self._goes_on

    def before(self, microbatch_index: int, segment: Segment) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Returns at which parameters the backward must begin too, and with which gradients."""
        key = (microbatch_index, segment.commands[0])
        begun: list[tuple[nn.Parameter, torch.Tensor]] = []
        for parameter in self._shared.get(key, ()):
            self._aside.append((parameter, parameter.grad))
            partials = self._partial.get((microbatch_index, id(parameter)), {})
            partial = partials.pop(segment.backwards, None)
            if partial is None or parameter._backward_hooks:  # those have seen it
                parameter.grad = partial
            else:
                parameter.grad = None
                begun.append((parameter, partial))
        if key in self._final:
            shared = {id(parameter) for parameter, _ in self._aside}
            others = self._deferred() | shared
            self._listen([p for p in self._final[key] if id(p) not in others])
        return begun

    def before_weights(self, microbatch_index: int, segment: Segment) -> None:
        """What the segment's backward has left for later comes now; :meth:`after` follows."""
        final = self._final.get((microbatch_index, segment.commands[0]), ())
        self._listen([parameter for parameter in final if id(parameter) in self._deferred()])

    def _listen(self, parameters: Sequence[nn.Parameter]) -> None:
        if parameters:
            self._handles = [p.register_post_accumulate_grad_hook(self._tell_final) for p in parameters]

    def _listen_no_more(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _tell_final(self, parameter: torch.Tensor) -> None:
        assert self.on_final is not None
        with torch._C.DisableTorchFunction():  # that ours looks at gradients is nothing to note
            self.on_final(parameter)

    def after(self, microbatch_index: int, segment: Segment) -> None:
        if not self._handles and not self._aside:
            return  # nothing was shared or final
        key = (microbatch_index, segment.commands[0])
        self._listen_no_more()
        final = {id(parameter) for parameter in self._final.get(key, ())}
        for parameter, total in self._aside:
            use = (microbatch_index, id(parameter))
            self._left[use] -= 1
            self._partial.setdefault(use, {})[segment.backwards] = parameter.grad
            if not self._left[use]:
                for _, partial in sorted(self._partial.pop(use).items()):
                    if total is None:
                        total = partial
                    elif partial is not None:
                        with torch.no_grad():
                            total.add_(partial)
            parameter.grad = total
            if id(parameter) in final and self.on_final is not None:
                self.on_final(parameter)
        self._aside = []

    def cut(self, microbatch_index: int) -> None:
        """What was planned from that microbatch on does not run, but is planned anew."""
        self._final.clear()
        self._left = {use: n for use, n in self._left.items() if use[0] < microbatch_index}
        self._shared = {key: found for key, found in self._shared.items() if key[0] < microbatch_index}
        self._goes_on = {key for key in self._goes_on if key[0] < microbatch_index}

    def end_step(self) -> None:
        self._listen_no_more()  # a backward that failed has no end
        self._aside = []
        self._shared.clear()
        self._goes_on.clear()
        self._final.clear()
        self._left.clear()
        self._partial.clear()


def _owners(recording: Recording, segment: Segment) -> tuple[int | str, ...]:
    """The modules, by identity, and the single parameters, by name, that the segment runs."""
    commands = [recording.commands[index] for index in segment.commands]
    return tuple([c.parameter or id(c.module) for c in commands if c.parameter or c.module is not None])
