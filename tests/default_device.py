"""All tensors on one device: pytest's ``--device``.

Scripts, models and plain torch beside them are those of the other tests; only ``torch.set_default_device``
has been called before them. What compares bits on the CPU compares them there.
"""

from __future__ import annotations

import os

import torch

__all__ = ["KIND_VARIABLE", "put_all_there"]

KIND_VARIABLE = "SMP_LITE_TESTS_DEVICE"
"""The device's type: ``cuda``, or ``pretended`` (`tests.pretended_device`)."""


class _OwnGenerator(torch.Generator):
    """On the device, unless a test says where."""

    def __new__(cls, device: str | torch.device | None = None) -> torch.Generator:  # type: ignore[misc]
        return _Generator(device=os.environ[KIND_VARIABLE] if device is None else device)


_Generator = torch.Generator


def put_all_there() -> None:
    """From now on, in this process. (Generators of the pretended device are those of the CPU.)"""
    kind = os.environ[KIND_VARIABLE]
    if kind == "pretended":
        from tests.pretended_device.backend import COUNT_VARIABLE, install
        from tests.pretended_device.random_numbers import take_any_generator
        from tests.pretended_device.sharing import offer

        os.environ.setdefault(COUNT_VARIABLE, "1")
        install()
        offer()
        take_any_generator()
    else:
        torch.Generator = _OwnGenerator  # type: ignore[misc]
    torch.set_default_device(kind)
