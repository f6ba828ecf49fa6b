"""Programs as other people write them, each run twice: by the library, and by plain torch.

A *program* is a function that trains something through the SMP API. It gets the API as its first argument
(the library's, or :mod:`tests.programs.plain`'s, which means the same in one process of plain torch) and
``out``, with which it says what must be the same: losses, metrics, whatever it would print or save.
Whoever writes one need not know how the library works, and better does not.

    @program(stages=(2, 3))
    def two_losses(smp, out):
        model = smp.DistributedModel(Net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ...
        out.value("loss", loss)
        out.model(model)
"""

from __future__ import annotations

from tests.programs.registry import Program, program, programs

__all__ = ["Program", "program", "programs"]
