"""Roots that make views, change in place and use both, as text that was written at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HARD", "KEPT", "WIDTH", "Root", "random_lines"]

WIDTH = 6


class Block(nn.Module):
    """Saves none of its argument nor of its result, which others may change in place.

    Args:
        kind: 0: its result is what it has computed; 1 and 2: a view of that.
    """

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x * 1.0)) * 1.0
        return y if self.kind == 0 else y[:, :] if self.kind == 1 else y.t().contiguous().t()


class Root(nn.Module):
    """``[B, 6]`` to a number.

    Args:
        lines: code that computes ``loss`` from ``x`` with ``b``, the blocks.
        kinds: of the blocks.
    """

    def __init__(self, lines: list[str], kinds: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds)
        code = "\n    ".join(["def compute(b, x):", *lines, "return loss"])
        names: dict[str, Any] = {"torch": torch}
        exec(code, names)
        self._compute: Callable[..., Tensor] = names["compute"]

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(self.blocks, x)


def random_lines(chance: random.Random, num_blocks: int) -> list[str]:
    """Between 4 and 12 random operations, then whatever blocks are left, then a sum of some of the values."""
    lines, names, left = ["x = b[0](x)"], ["x"], set(range(1, num_blocks))
    for number in range(chance.randint(4, 12)):
        a, other, new = chance.choice(names), chance.choice(names), f"t{number}"
        block = chance.randrange(num_blocks)
        makes = [
            f"b[{block}]({a})",
            f"{a}[:, :]",
            f"{a}.view(-1, {WIDTH})",
            f"{a}.transpose(0, 1).contiguous().t()",
            f"{a} + {other}",
            f"{a} * 0.7",
            f"torch.sin({a} * 1.0)",
            f"torch.cat([{a}, {other}], 1).chunk(2, 1)[1]",
            f"{a}.detach()[:, :] * 0.3 + {other}",
        ]
        changes = [
            f"{a}[0] = 0.5",
            f"{a}[:, {chance.randrange(WIDTH - 2)}:].mul_(1.5)",
            f"{a}.add_({other} * 0.3)",
            f"{a} += 0.25",
            f"{a}[:, 0] = {other}[:, 1] * 2",
        ]
        chosen = chance.choice(makes + changes)
        if chosen in changes:
            lines.append(chosen)
            continue
        if chosen == makes[0]:
            left.discard(block)
        lines.append(f"{new} = {chosen}")
        names.append(new)
    for block in sorted(left):
        lines.append(f"u{block} = b[{block}]({chance.choice(names)})")
    used = [*chance.sample(names, max(1, len(names) // 2)), *[f"u{block}" for block in sorted(left)]]
    terms = [f"{name}.sum() * {0.3 + 0.1 * i:.1f}" for i, name in enumerate(used)]
    return [*lines, "loss = " + " + ".join(terms)]


HARD = {
    "base and view after the change": (
        "0111",
        """x = b[0](x)
        view = x.view(-1, 6)
        x[0] = 0.5
        y = b[2](x)
        z = b[3](view)
        loss = x.sum() * 0.3 + y.sum() * 0.8 + z.sum() * 0.9""",
    ),
    "two views after the change": (
        "01",
        """x = b[0](x)
        first = x[:, :]
        second = first[:, :]
        first[:, 1:].mul_(-1.0)
        y = b[1](x)
        loss = first.sum() * 0.4 + second.sum() * 0.6 + y.sum()""",
    ),
    "base before the change of a view": (
        "012",
        """x = b[0](x)
        y = b[2](x)
        view = x[:, :]
        z = torch.sin(view * 1.0)
        view.add_(z * 0.3)
        u = b[1](view)
        loss = y.sum() * 0.5 + u.sum() * 0.6""",
    ),
    "a view of nothing that is held, before": (
        "01",
        """x = b[0](x)
        view = x.transpose(0, 1).contiguous().t()
        y = b[1](view)
        z = torch.sin(b[1](view) + x)
        view.add_(z * 0.3)
        loss = view.sum() * 0.4 + y.sum() * 0.5""",
    ),
}
"""Stages of the blocks, and code whose gradients are added up in an order that our segments cannot keep."""

KEPT = {
    "a view of nothing that is held, and after": (
        "01",
        """x = b[0](x)
        t1 = b[1](x)
        view = t1.transpose(0, 1).contiguous().t()
        view[:, 0] = x[:, 1] * 2
        y = b[1](view)
        t1[:, 0] = view[:, 1] * 2
        view[:, 1:].mul_(0.5)
        loss = x.sum() * 0.3 + t1.sum() * 0.4 + view.sum() * 0.5 + y.sum() * 0.6""",
    ),
}
"""The same, of which the order is kept: the copy that changes is laid out like the view."""
