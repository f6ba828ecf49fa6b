"""The memory of ordinary tensors: which it is, who else may change it, what is in it."""

from __future__ import annotations

import contextlib
import ctypes
import zlib

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...devices import is_host

__all__ = ["digest_of", "is_given_back", "is_shared", "num_users", "place_of", "storage_of", "version_of"]

_NOTHING = contextlib.nullcontext()


def storage_of(tensor: torch.Tensor) -> int | None:
    """Identifies the memory of an ordinary tensor; None: it has none of its own that can be told."""
    with torch._C.DisableTorchFunction():  # no call of the user's
        if tensor.layout is not torch.strided:
            return None
        try:
            return tensor.untyped_storage()._cdata
        except NotImplementedError:  # inside a transformation of torch.func it stands for another tensor
            return None


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a dense tensor begins, also on a device of which the host knows no addresses."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether somebody beside torch may hold an ordinary tensor's memory: numpy, which changes it unheard."""
    if storage_of(tensor) is None:
        return False
    with torch._C.DisableTorchFunction():
        return not tensor.untyped_storage().resizable()


def num_users(tensor: torch.Tensor) -> int:
    """How many tensors hold its memory, itself included; also those that Python has no object of. 1 where it
    has none of its own that can be told."""
    if storage_of(tensor) is None:
        return 1
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()  # holds it too
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined]


def is_given_back(tensor: torch.Tensor) -> bool:
    """Whether it has elements and no memory, as a sharded parameter that nobody uses: to read it ends the
    process."""
    with torch._C.DisableTorchFunction():
        return (
            tensor.layout is torch.strided
            and tensor.numel() > 0
            and not tensor.is_meta
            and not tensor.untyped_storage().nbytes()
        )


def version_of(tensor: torch.Tensor) -> int:
    """The count of its changes in place; those of tensors made in inference mode torch does not count."""
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


def digest_of(tensor: torch.Tensor) -> int:
    """Of the numbers of an ordinary tensor, which may have changed without a new version; else 0."""
    if type(tensor) is not torch.Tensor or not is_host(tensor.device):
        return 0
    # By address: inside a fake run torch would compare fake tensors.
    is_plain = torch._C._len_torch_dispatch_stack() == 0  # to ask takes less than to switch off nothing
    with (
        torch._C.DisableTorchFunction(),
        _NOTHING if is_plain else _disable_current_modes(),
        torch.no_grad(),
    ):
        if tensor.layout is not torch.strided or not tensor.numel() or is_given_back(tensor):
            return 0
        tensor = tensor.detach().contiguous()
        return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
