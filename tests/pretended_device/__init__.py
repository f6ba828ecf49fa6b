"""A pretended accelerator, on which ordinary CI tests that tensors are where they should be.

``backend.install()`` makes ``torch.device("pretended")``, by torch's PrivateUse1 and its Python backend
(where torch has none, ``tests.harness`` skips what needs it). Its tensors are plain ``torch.Tensor`` objects,
as those of CUDA are, with memory of the host underneath; every operation runs on the CPU, so results are the
CPU's to the bit. What a real device refuses it refuses too:

- an operation on tensors of the device and of the CPU together, except for what CUDA allows: numbers in CPU
  tensors without dimensions, indices, copies;
- ``data_ptr()``, which is how memory gets into MPI, ``numpy()``, and ``torch.distributed`` over gloo;
- a copy into pinned memory with ``non_blocking`` gives nonsense until an event, or a wait, says it ended.

A stream beside the computing one copies late in both directions, and there it is an error if the device's
memory is freed before, or if the stream has not waited for those who use it. So are collectives of process
groups that carry the device's tensors (:mod:`.groups`). Graphs (:mod:`.graphs`) run what was captured again,
on the same memory.

``SMP_LITE_PRETENDED_DEVICES`` says how many devices there are (1), before ``install()``. Gradients are to be
had on the first of them alone: torch tells its autograd engine of one device of a backend in Python.
"""
