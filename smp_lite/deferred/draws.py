"""Random numbers at the time when they would have been drawn, though nobody keeps them yet.

A draw advances the generator at once, so the generator is, at every moment and after, where plain
construction leaves it; the numbers are dropped, and drawn again from the noted state by who keeps them. So a
rank's construction takes the time of all draws and the memory of none: ``uniform_`` and ``normal_`` draw
element by element, and are dropped in chunks. (Skipping ahead in the Mersenne twister would save the time;
torch has no function for it.)
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["advance", "draws", "draws_blindly", "noted_state"]

_CHUNK = 1 << 18
_VECTOR = 16  # normal_ draws for that many at once, and again for the last ones of a number between

# How much these draw depends on the shape, not on values.
_BLIND = frozenset(
    [
        *("normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli_"),
    ]
)


_SLAB = 256
_slab: list[torch.Tensor] = []
_used = _SLAB


def noted_state(generator: torch.Generator | None) -> torch.Tensor:
    """The generator's state (None: torch's), in memory that lies together: thousands of pieces of 5 KiB
    between large tensors that come and go would keep the allocator from using their memory again."""
    global _used
    state = torch.get_rng_state() if generator is None else generator.get_state()
    if _used == _SLAB or _slab[0].shape[1] != len(state):
        _slab[:] = [torch.empty(_SLAB, len(state), dtype=torch.uint8, device="cpu")]
        _used = 0
    found = _slab[0][_used]
    found.copy_(state)
    _used += 1
    return found


def draws(function: Any) -> bool:
    """Whether an operation takes numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def draws_blindly(function: Any) -> bool:
    """Whether how far it moves the generator can be told from shapes alone."""
    name = function._schema.name.removeprefix("aten::")
    return name in _BLIND and not (name == "bernoulli_" and "Tensor" in function._overloadname)


def advance(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Draws and drops. Tensors among the arguments are meta ones, which stand for empty memory."""
    name = function._schema.name.removeprefix("aten::")
    target = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if name in ("normal_", "uniform_") and target is not None:
        _drop_elements(name, target, kwargs.get("generator"))
        return
    empty = [
        torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="cpu")
        if isinstance(arg, torch.Tensor)
        else arg
        for arg in args
    ]
    function(*empty, **kwargs)


def _drop_elements(name: str, target: torch.Tensor, generator: torch.Generator | None) -> None:
    count = target.numel()
    if not target.is_contiguous() or count < 2 * _CHUNK or not target.is_floating_point():
        whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
        getattr(whole, name)(generator=generator)
        return
    chunk = torch.empty(_CHUNK + _VECTOR, dtype=target.dtype, device="cpu")
    while count >= _CHUNK + _VECTOR:
        getattr(chunk[:_CHUNK], name)(generator=generator)
        count -= _CHUNK
    getattr(chunk[:count], name)(generator=generator)
