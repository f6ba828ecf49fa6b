"""What a step function does about gradients itself: ``model.backward``, ``requires_grad_()``, ``.grad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...errors import SMPError
from ..commands.recording import Backward
from ..commands.replay import refuse
from ..values.placed import PlacedTensor, TensorMeta

if TYPE_CHECKING:
    from .recorder import Recorder

__all__ = ["backward", "deep_copy", "gradient_of", "require_gradient", "set_attribute"]


def backward(recorder: Recorder, tensors: Any, grad_tensors: Any = None) -> None:
    """``model.backward``: notes from where the backward pass starts."""
    if recorder.recording is None:
        raise SMPError("model.backward() was called outside a function decorated with @smp.step")
    losses = list(tensors) if isinstance(tensors, tuple | list) else [tensors]
    if grad_tensors is None:
        gradients: list[torch.Tensor | None] = [None] * len(losses)
    else:
        gradients = list(grad_tensors) if isinstance(grad_tensors, tuple | list) else [grad_tensors]
    if len(gradients) != len(losses):
        raise ValueError(f"backward got {len(losses)} tensors and {len(gradients)} grad_tensors")
    values = []
    for i, (loss, gradient) in enumerate(zip(losses, gradients, strict=True)):
        loss = recorder.ordinary.placed_for(loss)
        if loss is None or not loss.smp_meta.requires_grad:
            raise SMPError(
                "model.backward(): the loss does not depend on any parameter of the model that "
                "requires a gradient (was it detached, or computed under torch.no_grad()?)"
            )
        if gradient is None and loss.smp_meta.num_bytes != loss.smp_meta.dtype.itemsize:
            raise SMPError(
                f"model.backward(): the loss has shape {loss.smp_meta.shape}, not one element: "
                "reduce it, or pass grad_tensors"
            )
        if type(gradient) is PlacedTensor:
            (gradients[i],) = recorder.forced.fetch([gradient], "a gradient given to model.backward()")
        elif gradient is not None and recorder.tape is not None:  # a replay reads it as it is by then
            gradients[i] = recorder.tape.call(torch.clone, (gradient.detach(),), {})
        elif gradient is not None:
            with torch._C.DisableTorchFunction():
                gradients[i] = gradient.detach().clone()  # the script may write to it before it is used
        _check_gradient(gradients[i], loss.smp_meta)
        values.append(recorder.writer.value_of(loss))
    recorder.ordinary.before_backward()
    recorder.backward_state.note(recorder.recording, values)
    num_commands = len(recorder.recording.commands)
    recorder.recording.backwards.append(Backward(tuple(values), tuple(gradients), num_commands))
    # What another backward finds for them is added later, not in one sum with what this one does.
    recorder.ordinary.forget_inputs()


def _check_gradient(gradient: torch.Tensor | None, of: TensorMeta) -> None:
    """Autograd would take one of another shape in silence, if it can be expanded to that or summed up."""
    if gradient is None:
        return
    meta = TensorMeta.of(gradient)
    if meta.shape != of.shape:
        raise SMPError(
            f"model.backward(): a gradient has shape {meta.shape}, what it is of {of.shape}: give one of the "
            "same shape"
        )
    if meta.dtype.is_complex != of.dtype.is_complex:
        raise SMPError(
            f"model.backward(): a gradient is {meta.dtype}, what it is of {of.dtype}: give one of that type"
        )


def gradient_of(recorder: Recorder, placed: PlacedTensor) -> torch.Tensor | None:
    """``placed.grad``: of a parameter, what earlier steps have left.

    Raises:
        SMPError: this step has a backward already, which has not run yet.
    """
    full = placed.smp_parameter
    if full is None:
        return None
    if any(recording.backwards for recording in recorder.recordings.values()):
        raise SMPError(
            f"the gradient of the parameter {full!r} was looked at inside an smp.step after "
            "model.backward(): gradients are there when the step function has returned"
        )
    return recorder.placement.parameter(full).grad


def require_gradient(recorder: Recorder, target: Any, requires_grad: bool = True) -> Any:
    """``requires_grad_()``: a value that needs no gradient becomes a leaf from here on."""
    if bool(requires_grad) == target.requires_grad:
        return target
    if target.smp_parameter is not None:
        raise SMPError(
            f"requires_grad of the parameter {target.smp_parameter!r} was changed inside an smp.step, "
            f"where "
            "calls of earlier lines have not run yet: change it between steps, or detach() what shall "
            "not "
            "be trained"
        )
    if not requires_grad:
        raise SMPError(
            "requires_grad_(False) was called inside an smp.step on a result: write x = x.detach()"
        )
    leaf = recorder.writer.function(as_leaf, recorder.arguments((target,), {}))
    target.smp_meta, target.smp_value, target.smp_stage = leaf.smp_meta, leaf.smp_value, leaf.smp_stage
    with torch._C.DisableTorchFunction():
        target.requires_grad_()
    return target


def deep_copy(recorder: Recorder, placed: PlacedTensor) -> Any:
    """``copy.deepcopy`` of it: another leaf, from which no gradient flows on.

    Raises:
        RuntimeError: it is no leaf, as torch says too.
    """
    if placed.requires_grad and placed.smp_parameter is None:
        raise RuntimeError(
            "copy.deepcopy of a result of the step through which a gradient flows: torch copies leaves only; "
            "clone() it"
        )
    copied = recorder.torch_function(torch.Tensor.detach, (placed,), {})
    copied = recorder.torch_function(torch.clone, (copied,), {})
    return require_gradient(recorder, copied) if placed.requires_grad else copied


def set_attribute(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
    target, value = args
    if name == "requires_grad" and type(target) is PlacedTensor:
        require_gradient(recorder, target, value)
        return
    if name == "grad" and value is None and target.smp_parameter is not None:
        if recorder.tape is not None:
            raise refuse("clears gradients")
        gradient_of(recorder, target)
        recorder.placement.parameter(target.smp_parameter).grad = None
        return
    if name == "data" and value is target:
        return  # module.to(dtype) where it has that dtype
    raise SMPError(
        f"tensor.{name} = ... inside an smp.step, on a tensor that lives on one stage or with one, "
        f"cannot be "
        "recorded: do it between steps, or with x.copy_(...) inside a module that is placed on one stage"
    )


def as_leaf(x: torch.Tensor) -> torch.Tensor:
    """What ``requires_grad_()`` makes of a result without a gradient."""
    return x.detach().requires_grad_()
