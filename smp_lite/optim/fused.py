"""LAMB and NovoGrad: what SMP v1 scripts import from ``smp.optimizers``.

There, as in NVIDIA apex, CUDA kernels fuse what they compute; here it is plain torch, with the same arguments
and the same mathematics, on any device. Sources: LAMB, You et al. 2019 (arXiv:1904.00962); NovoGrad, Ginsburg
et al. 2019 (arXiv:1905.11286); for arguments, defaults and what the papers leave open, apex's documentation
(nvidia.github.io/apex/optimizers.html).

``FusedLAMB`` clips by the norm of all gradients (``max_grad_norm``, 1 unless told otherwise), so it looks at
the whole model at once, and each stage would clip by another factor: over several partitions
``smp.DistributedOptimizer`` refuses it (see :mod:`.optimizer_check`) unless ``max_grad_norm`` is 0 or None,
which means no limit. ``torch.nn.utils.clip_grad_norm_`` before ``step()`` does the same for the whole model.
``FusedNovoGrad`` treats each parameter by itself.

As in apex, steps are counted per group (``group["step"]``), and a parameter whose first gradient comes later
is corrected for its group's count. Unlike apex, which keeps the state of half-precision parameters in their
own type, the state is float32 for them: squares of float16 gradients would mostly round to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

__all__ = ["FusedLAMB", "FusedLamb", "FusedNovoGrad"]

_STATE_KEYS = ("exp_avg", "exp_avg_sq")


class _Fused(torch.optim.Optimizer):
    """What both have in common: options of the whole optimizer, the loop over parameters, loading.

    Args:
        params: parameters or groups of them.
        defaults: of the options that a group can have for itself.
        amsgrad: must be False.
        set_grad_none: what :meth:`zero_grad` does unless told otherwise.
    """

    set_grad_none: bool
    _options: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    """Attributes that count for all groups, and that torch would lose in a copy."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], amsgrad: bool, set_grad_none: bool) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__}: it has no AMSGrad variant (amsgrad=True)")
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._options}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients.

        Args:
            set_to_none: None: as ``set_grad_none`` of the constructor says.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient.

        Args:
            closure: computes the gradients and returns the loss; called once.

        Returns:
            What the closure returns.

        Raises:
            RuntimeError: a gradient is sparse, or complex. Nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for gradient in gradients:
            if gradient.layout is not torch.strided:
                raise RuntimeError(f"{type(self).__name__} takes no sparse gradients: use SparseAdam")
            if gradient.is_complex():
                raise RuntimeError(f"{type(self).__name__} takes real parameters, got {gradient.dtype}")
        divisor = self._divisor(gradients)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = _wide(parameter.grad)
                    if divisor is not None:
                        gradient = gradient / divisor.to(gradient)
                    update = self._update(group, self.state[parameter], _wide(parameter), gradient)
                    # Of two types torch computes in the wider one and rounds the result.
                    parameter.sub_(update)
        return loss

    def _divisor(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        """What all gradients are divided by first; None: nothing."""
        return None

    def _update(
        self, group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        """What to take from a weight; brings its state up to date."""
        raise NotImplementedError("the algorithm's own")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; torch's own would round that of half-precision parameters to their type."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(saved, parameters, strict=True):
            if parameter.dtype != _wide_type(parameter.dtype):
                loaded = state_dict["state"].get(number, {})
                for key in loaded.keys() & _STATE_KEYS:
                    self.state[parameter][key] = loaded[key].to(parameter.device, _wide_type(parameter.dtype))


class FusedLAMB(_Fused):
    """LAMB: Adam's update, scaled for each parameter to the norm of its weights ("trust ratio").

    All gradients are first divided by their common norm over ``max_grad_norm`` where that is above 1. Then::

        m = beta1 * m + beta3 * g              beta3 = 1 - beta1, or 1 without grad_averaging
        v = beta2 * v + (1 - beta2) * g**2
        u = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * w
        w = w - lr * |w| / |u| * u

    Args:
        params: parameters or groups of them.
        lr: step size; with the trust ratio it is relative to the norm of the weights.
        bias_correction: False: without the divisions by ``1 - beta**t``.
        betas: decay rates of the averages of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: see ``adam_w_mode``. The trust ratio is 1 in groups where it is 0 (and where |w| or |u|
            is 0).
        amsgrad: must be False.
        adam_w_mode: whether weight decay is added to the update; False: to the (clipped) gradient.
        grad_averaging: see beta3.
        set_grad_none: whether :meth:`zero_grad` removes gradients, or makes them zero.
        max_grad_norm: the largest L2 norm of all gradients together; 0 or None: no limit. As in apex it is
            one for all groups, the constructor's, whatever a group says.
        use_nvlamb: whether groups without weight decay have a trust ratio too.

    Raises:
        RuntimeError: ``amsgrad`` is True.
        ValueError: ``max_grad_norm`` is negative.
    """

    adam_w_mode: bool
    use_nvlamb: bool
    _options = ("set_grad_none", "adam_w_mode", "use_nvlamb")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if max_grad_norm and max_grad_norm < 0:
            raise ValueError(f"FusedLAMB: max_grad_norm={max_grad_norm}: a limit is positive; 0: no limit")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb

    def _divisor(self, gradients: list[torch.Tensor]) -> torch.Tensor | None:
        limit = self.defaults["max_grad_norm"]
        if not limit or not gradients:
            return None
        norms = [torch.linalg.vector_norm(_wide(gradient)).to(gradients[0].device) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        return torch.where(norm > limit, norm / limit, 1.0)  # no question to the device

    def _update(
        self, group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        if "exp_avg" not in state:
            for key in _STATE_KEYS:
                state[key] = torch.zeros_like(weight)
        if decay and not self.adam_w_mode:
            gradient = gradient.add(weight, alpha=decay)
        average = state["exp_avg"].mul_(beta1).add_(gradient, alpha=_beta3(group))
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = _corrections(group)
        update = (average / correction1).div_((square / correction2).sqrt_().add_(group["eps"]))
        if decay and self.adam_w_mode:
            update.add_(weight, alpha=decay)
        rate = group["lr"]
        if decay or self.use_nvlamb:
            length, step_length = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
            has_ratio = (length > 0) & (step_length > 0)
            rate = rate * torch.where(has_ratio, length / step_length, 1.0)
        return update.mul_(rate)


FusedLamb = FusedLAMB
"""Another spelling in SMP v1."""


class FusedNovoGrad(_Fused):
    """NovoGrad: momentum of gradients that are divided by a running norm, one number for each parameter.

    With L2 norms, and the maximum norm in brackets::

        v = sqrt(beta2 * v**2 + (1 - beta2) * |g|**2)        [v = beta2 * v + (1 - beta2) * |g|]
        d = v / sqrt(1 - beta2**t) + eps

    and then, with ``reg_inside_moment``, as in the paper::

        m = beta1 * m + beta3 * (g / d + weight_decay * w)   beta3 = 1 - beta1, or 1 without grad_averaging
        w = w - lr * m / (1 - beta1**t)

    or without it, apex's default, which averages the gradients as they are::

        m = beta1 * m + beta3 * g
        w = w - lr * (m / (1 - beta1**t) / d + weight_decay * w)

    v starts as the norm of the first gradient; it is divided by ``sqrt(1 - beta2**t)`` nevertheless, as in
    apex, which makes the first steps short. The paper's algorithm is the one with ``reg_inside_moment``,
    without ``grad_averaging`` and without ``bias_correction``.

    Args:
        params: parameters or groups of them.
        lr: step size.
        bias_correction: False: without the divisions by ``1 - beta1**t`` and ``sqrt(1 - beta2**t)``.
        betas: decay rates of the averages of gradients and of their norms.
        eps: added to the denominator.
        weight_decay: factor of the weights in the update.
        amsgrad: must be False.
        reg_inside_moment: whether norm and weight decay go into the momentum, see above.
        grad_averaging: see beta3.
        norm_type: 2: L2; 0: the maximum norm.
        init_zero: whether v starts at 0 instead.
        set_grad_none: whether :meth:`zero_grad` removes gradients, or makes them zero.

    Raises:
        RuntimeError: ``amsgrad`` is True, or ``norm_type`` another one.
    """

    reg_inside_moment: bool
    _options = ("set_grad_none", "reg_inside_moment")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self.reg_inside_moment = reg_inside_moment

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; also called for each one of the constructor's.

        Raises:
            RuntimeError: its ``norm_type`` is neither 2 nor 0.
        """
        norm_type = param_group.get("norm_type", self.defaults["norm_type"])
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad: norm_type={norm_type!r}: there are 2 (L2) and 0 (maximum)")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state.

        Raises:
            ValueError: it is apex's, which keeps the norms of a group in one tensor that does not say whose
                they are.
        """
        if any("exp_avg_sq" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "FusedNovoGrad.load_state_dict: the norms (exp_avg_sq) are in the groups, as apex saves "
                "them, and not with each parameter: start from the weights alone"
            )
        super().load_state_dict(state_dict)

    def _update(
        self, group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        beta2 = group["betas"][1]
        decay = group["weight_decay"]
        norm = _max_norm(gradient) if group["norm_type"] == 0 else torch.linalg.vector_norm(gradient)
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        running = state["exp_avg_sq"]
        if group["norm_type"] == 0:
            running.mul_(beta2).add_(norm, alpha=1 - beta2)
        else:
            running.square_().mul_(beta2).addcmul_(norm, norm, value=1 - beta2).sqrt_()
        correction1, correction2 = _corrections(group)
        denominator = running / math.sqrt(correction2) + group["eps"]
        if self.reg_inside_moment:
            gradient = (gradient / denominator).add_(weight, alpha=decay)
        average = state["exp_avg"].mul_(group["betas"][0]).add_(gradient, alpha=_beta3(group))
        update = average / correction1
        if not self.reg_inside_moment:
            update.div_(denominator).add_(weight, alpha=decay)
        return update.mul_(group["lr"])


def _beta3(group: dict[str, Any]) -> float:
    """The factor of a new gradient in the average."""
    return 1 - group["betas"][0] if group["grad_averaging"] else 1.0


def _corrections(group: dict[str, Any]) -> tuple[float, float]:
    """What the averages are too small by, which start at zero."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]


def _max_norm(tensor: torch.Tensor) -> torch.Tensor:
    # torch has no maximum of nothing.
    return tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_wide_type(tensor.dtype))
