"""What the tests of the pretended device run, in a process that has it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models import CASES

__all__ = [
    "as_torch_knows_it",
    "differences_of_case",
    "graphs",
    "late_copies",
    "mixed",
    "moves",
    "several",
    "storages",
    "streams",
]


def _device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "nothing was raised"


def mixed() -> tuple[dict[str, str], list[bool]]:
    """Errors of what mixes devices or reads memory; whether what CUDA allows too is right."""
    here, there = torch.arange(6.0).view(2, 3), torch.arange(6.0, device=_device()).view(2, 3)
    target = torch.zeros(2, 3, device=_device())
    errors = {
        "add": _error(lambda: there + here),
        "reversed": _error(lambda: here + there),
        "in place": _error(lambda: target.add_(here)),
        "cat": _error(lambda: torch.cat([there, here])),
        "linear": _error(lambda: F.linear(there, here)),
        "out": _error(lambda: torch.add(here, here, out=target)),
        "foreach": _error(lambda: torch._foreach_add([there], [here])),
        "address": _error(there.data_ptr),
        "numpy": _error(there.numpy),
        "generator": _error(lambda: torch.rand(3, device=_device(), generator=torch.Generator())),
    }
    index = torch.tensor([1, 0])
    right = [
        torch.equal((there * torch.tensor(2.0)).cpu(), here * 2),
        torch.equal(there[index].cpu(), here[index]),
        torch.equal(target.copy_(here).cpu(), here),
        torch.equal(torch.zeros(2, 3).copy_(there), here),
        type(there) is torch.Tensor and type(nn.Linear(2, 2).to(_device()).weight) is nn.Parameter,
    ]
    return errors, right


def differences_of_case(name: str) -> list[str]:
    """In which a model's losses and gradients on the device differ from the CPU's."""
    case = CASES[name]
    found: list[list[Any]] = []
    for device in (torch.device("cpu"), _device()):
        torch.manual_seed(0)
        model = case.build().to(device)
        torch.manual_seed(1)
        batch = {
            key: value.to(device) if isinstance(value, Tensor) else value
            for key, value in case.batch(4).items()
        }
        with sdpa_kernel(SDPBackend.MATH):  # what torch chooses for a device that it does not know
            loss = case.loss_of(case.forward_loss(model, batch))
            loss.backward()
        gradients = [(key, p.grad) for key, p in model.named_parameters()]
        assert all(grad is None or grad.device == device for _, grad in gradients)
        found.append([("loss", loss.detach()), *gradients])
    return [
        key
        for (key, ours), (_, theirs) in zip(*found, strict=True)
        if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs.cpu()))
    ]


def moves() -> list[bool]:
    """Whether copies, views, files, fake tensors and random numbers are right."""
    device = _device()
    torch.manual_seed(0)
    linear = nn.Linear(3, 4)
    ours = copy.deepcopy(linear).to(device)
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    loaded = []
    for where in ("cpu", None):
        buffer.seek(0)
        loaded.append(torch.load(buffer, map_location=where))
    base = torch.zeros(4, 4, device=device)
    view = base.t()[1:3]
    view.add_(1)
    base.view(-1)[:2] = 5
    torch.manual_seed(7)
    drawn = torch.randn(5, device=device), torch.rand(3, device=device)
    torch.manual_seed(7)
    expected = torch.randn(5), torch.rand(3)
    grown = torch.arange(3.0, device=device)
    grown.resize_(5)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake = mode.from_tensor(ours.weight)
        product = fake @ fake.t()
    return [
        torch.equal(loaded[0]["weight"], linear.weight) and loaded[0]["weight"].device.type == "cpu",
        loaded[1]["weight"].device == device and torch.equal(loaded[1]["weight"].cpu(), linear.weight),
        base.cpu().tolist()[0] == [5, 5, 1, 0] and view.cpu().tolist()[0][1:] == [1, 1, 1],
        all(torch.equal(a.cpu(), b) for a, b in zip(drawn, expected, strict=True)),
        grown.cpu().tolist()[:3] == [0, 1, 2] and grown.shape == (5,),
        product.device == device and product.shape == (4, 4),
        torch.tensor([1.5], device=device).item() == 1.5,
        copy.deepcopy(ours).weight.device == device,
    ]


def late_copies() -> list[bool]:
    """Whether a copy into pinned memory ends when somebody has waited, and not before."""
    module: Any = torch.get_device_module(_device())
    there = torch.arange(1.0, 4.0, device=_device())
    host = torch.empty(3).pin_memory()
    host.copy_(there, non_blocking=True)
    event = module.Event()
    event.record()
    there.zero_()  # comes after the copy in the stream
    early = not torch.equal(host, torch.tensor([1.0, 2.0, 3.0]))
    polls = 0
    while not event.query():
        polls += 1
    late = torch.equal(host, torch.tensor([1.0, 2.0, 3.0]))
    pageable = torch.empty(3)
    pageable.copy_(there, non_blocking=True)
    return [early, late, polls > 0, host.is_pinned(), torch.equal(pageable, torch.zeros(3))]


def graphs() -> list[bool]:
    """Whether a capture does nothing, and a replay does it on the memory of the capture."""
    module: Any = torch.get_device_module(_device())
    x = torch.arange(4.0, device=_device())
    total = torch.zeros(4, device=_device())
    linear = nn.Linear(4, 4).to(_device())
    graph = module.CUDAGraph()
    computed = module.Event()
    computed.record()
    stream = module.Stream()
    with module.stream(stream):
        stream.wait_event(computed)
        graph.capture_begin(pool=module.graph_pool_handle())
        y = linear(x).square()
        total.add_(y[1:].sum())
        (gradient,) = torch.autograd.grad(y.sum(), linear.weight)
        read = _error(lambda: y.sum().item())
        graph.capture_end()
    host = nn.Linear(4, 4)
    host.load_state_dict({name: value.cpu() for name, value in linear.state_dict().items()})
    right = ["capturing" in read, bool((total.cpu() == 0).all())]
    for start in (1.0, 2.0):
        x.copy_(torch.arange(start, start + 4.0))
        right.append(not torch.equal(y.cpu(), host(x.cpu()).square()))
        graph.replay()
        expected = host(x.cpu()).square()
        right += [
            torch.equal(y.cpu(), expected),
            torch.equal(gradient.cpu(), torch.autograd.grad(expected.sum(), host.weight)[0]),
        ]
    right.append(bool((total.cpu() > 0).all()))
    with torch.no_grad():
        linear.weight.zero_()  # in place: the graph reads what is there
    host.load_state_dict({name: value.cpu() for name, value in linear.state_dict().items()})
    graph.replay()
    right.append(torch.equal(y.cpu(), host(x.cpu()).square()))
    return right


def streams() -> tuple[list[bool], dict[str, str]]:
    """Whether copies beside the computing stream are right where they are waited for; errors where not."""
    module: Any = torch.get_device_module(_device())
    beside = module.Stream()
    host = torch.empty(4).pin_memory()

    def out(source: torch.Tensor, *, waits: bool = True) -> Any:
        computed = module.Event()
        computed.record()
        with module.stream(beside):
            if waits:
                beside.wait_event(computed)
            host.copy_(source, non_blocking=True)
            ended = module.Event()
            ended.record()
        return ended

    source = torch.arange(4.0, device=_device())
    ended = out(source)
    right = [not torch.equal(host, torch.arange(4.0))]
    module.current_stream().wait_event(ended)
    right.append(torch.equal(host, torch.arange(4.0)))
    ended = out(source)
    source.zero_()  # before the copy, since nothing waits for it
    module.current_stream().wait_event(ended)
    right.append(torch.equal(host, torch.zeros(4)))
    errors = {"not waited": _error(lambda: out(source + 1, waits=False))}
    module.synchronize()
    ended = out(source + 1)  # nobody keeps it
    errors["freed"] = _error(lambda: module.current_stream().wait_event(ended))
    with module.stream(beside):
        source.copy_(torch.ones(4).pin_memory(), non_blocking=True)
        ended = module.Event()
        ended.record()
    right.append(not torch.equal(source.cpu(), torch.ones(4)))
    module.current_stream().wait_event(ended)
    right.append(torch.equal(source.cpu(), torch.ones(4)))
    return right, errors


def storages() -> tuple[list[bool], str, str]:
    """Whether memory is counted that a storage gives back and takes again; errors of using it between."""
    module: Any = torch.get_device_module(_device())
    beside = module.Stream()
    host = torch.ones(4).pin_memory()
    tensor = torch.arange(4.0, device=_device())
    storage, before = tensor.untyped_storage(), module.memory_allocated()
    storage.resize_(0)
    right = [before - module.memory_allocated() == 16]
    used = _error(lambda: tensor + 1)
    storage.resize_(16)
    right += [module.memory_allocated() == before, not torch.equal(tensor.cpu(), torch.arange(4.0))]
    tensor.copy_(torch.arange(4.0))
    right.append(torch.equal(tensor.cpu(), torch.arange(4.0)))
    beside.wait_stream(module.current_stream())
    with module.stream(beside):
        host.copy_(tensor, non_blocking=True)
    storage.resize_(0)
    storage.resize_(16)
    return right, used, _error(beside.synchronize)


def several() -> tuple[list[str], str, str]:
    """Tensors of two devices: where they are; errors of mixing them, and of a third device."""
    kind = _device().type
    first, second = torch.ones(2, device=f"{kind}:0"), torch.ones(2, device=f"{kind}:1")
    moved = first.to(second.device) + second
    torch.accelerator.set_device_index(1)
    current = torch.accelerator.current_device_index()
    names = [str(first.device), str(second.device), str(moved.device), str(current)]
    return names, _error(lambda: first + second), _error(lambda: torch.accelerator.set_device_index(2))


def as_torch_knows_it() -> tuple[str, int, bool]:
    """The accelerator's name, how many there are, and whether one is there."""
    return str(_device()), torch.accelerator.device_count(), torch.accelerator.is_available()
