"""Scripts that speak of CUDA run on machines without, where that is asked for."""

from __future__ import annotations

import pytest

from smp_lite.smp_v1.before_script import CUDA_AS_CPU_VARIABLE, prepare
from tests.smp_v1.interpreter import output_of

ON = {CUDA_AS_CPU_VARIABLE: "1"}


def lines_of(text: str) -> list[str]:
    return output_of(text, **ON).splitlines()


@pytest.mark.slow
def test_functions_do_nothing_and_counters_say_nothing() -> None:
    assert lines_of(
        """
        import torch
        torch.cuda.set_device(3); torch.cuda.synchronize(); torch.cuda.empty_cache()
        torch.cuda.manual_seed(1); torch.cuda.manual_seed_all(1); torch.cuda.reset_peak_memory_stats()
        torch.cuda.random.set_rng_state_all(torch.cuda.random.get_rng_state_all())
        print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device())
        print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(0), torch.cuda.memory_stats())
        print(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory)
        torch.manual_seed(0); a = torch.rand(1); torch.cuda.manual_seed(5); torch.manual_seed(0)
        print(torch.equal(a, torch.rand(1)))
        """
    ) == ["True 1 3", "0 0 {}", "CPU 0", "True"]


def test_devices_mean_the_cpu_wherever_torch_takes_one() -> None:
    text = """
        import torch
        from torch import nn
        x, cuda = torch.ones(2), torch.device("cuda", 1)
        made = [
            x.to("cuda"), x.to(cuda), x.to(device="cuda:0", non_blocking=True), x.cuda(), x.cuda(0),
            torch.zeros(2, device="cuda"), torch.arange(3, device=cuda), torch.tensor([1], device="cuda"),
            torch.randn(2, device=cuda), x.to("cuda", torch.float64), x.new_zeros(2, device="cuda"),
            torch.empty(2, pin_memory=True), x.pin_memory(), torch.full_like(x, 1.0, device="cuda"),
            nn.Linear(1, 1).to("cuda").weight, nn.Linear(1, 1).to(cuda, torch.float64).weight,
            nn.Linear(1, 1).cuda().weight, nn.Linear(1, 1, device="cuda").weight,
            x.to(0), torch.zeros(2, device=0), nn.Linear(1, 1).to(0).weight, torch.cuda.FloatTensor([1.0]),
        ]
        assert x.cuda().device == torch.device("cuda", 0) == torch.device(torch.cuda.current_device())
        assert x.type("torch.cuda.LongTensor").dtype is torch.int64
        torch.cuda.nvtx.range_push("a")
        with torch.random.fork_rng():
            torch.rand(1)
        print({tensor.device.type for tensor in made}, x.to("cuda", torch.float64).dtype)
        print(x.to("cuda") is x.to("cpu"))
        """
    assert lines_of(text) == ["{'cpu'} torch.float64", "True"]


def test_what_was_saved_is_loaded() -> None:
    text = """
        import io, torch
        class Own:
            pass
        file = io.BytesIO()
        torch.save({"own": Own(), "x": torch.ones(1)}, file)
        for location in (None, "cuda:0", torch.device("cuda", 1), {"cuda:0": "cuda:1"}):
            file.seek(0)
            found = torch.load(file, location)
            print(type(found["own"]).__name__, found["x"].device)
        """
    assert lines_of(text) == ["Own cpu"] * 4


def test_streams_and_events_are_there() -> None:
    text = """
        import time, torch
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            start.record(); time.sleep(0.02); end.record()
        torch.cuda.current_stream().synchronize(); end.synchronize()
        print(20 <= start.elapsed_time(end) < 5000)
        """
    assert lines_of(text) == ["True"]


@pytest.mark.slow
def test_a_model_trains_as_it_does_without() -> None:
    """The words alone change nothing, also where torch functions are recorded."""
    text = """
        import torch
        from torch import nn
        import smp_lite as smp
        CUDA = {cuda}
        smp.init_in_memory({{"partitions": 2, "microbatches": 2}})
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        model = smp.DistributedModel(net)
        if CUDA:
            model.to("cuda"); model.to(torch.device("cuda", 0))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        @smp.step
        def train_step(model, x):
            y = model(x)
            if CUDA:
                y = y.to("cuda") + torch.zeros(4, device="cuda").cuda()
            else:
                y = y.to("cpu") + torch.zeros(4)
            loss = y.square().mean()
            model.backward(loss)
            return loss
        for i in range(3):
            x = torch.linspace(-1, i + 1.0, 16).reshape(4, 4)
            optimizer.zero_grad()
            loss = train_step(model, x.to("cuda") if CUDA else x).reduce_mean()
            optimizer.step()
        print(float(loss), float(sum(p.sum() for p in model.state_dict().values())))
        """
    with_words = output_of(text.format(cuda=True), **ON).splitlines()[-1]
    without = output_of(text.format(cuda=False)).splitlines()[-1]
    assert with_words == without


def test_it_is_off_unless_asked_for() -> None:
    assert output_of("import torch; print(torch.cuda.is_available())").strip() == "False"


def test_the_variable_is_one_or_zero() -> None:
    with pytest.raises(ValueError, match="SMP_LITE_CUDA_AS_CPU='yes': it must be '1' or '0'"):
        prepare({CUDA_AS_CPU_VARIABLE: "yes"})
