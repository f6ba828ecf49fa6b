"""`python -m tests.benchmarks`: prints the tables, one claim after another."""

from __future__ import annotations

import argparse
import importlib

from rich.console import Console

PARTS = {
    "torch": "against_torch",
    "simulation": "against_simulation",
    "actions": "action_overhead",
    "recording": "recording_overhead",
    "empty": "empty_step",
    "python": "without_python",
    "memory": "peak_memory",
    "planned": "planned_memory",
    "planning": "planning_time",
    "tensor": "tensor_modes",
    "dtensor": "against_dtensor",
    "features": "memory_features",
    "fsdp": "against_fsdp",
    "device": "on_device",
}

NEEDS_A_DEVICE = {"device"}
"""Parts that run only when they are asked for."""

_FILE_WIDTH = 140
"""Columns where the output is no terminal."""


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    for part in options.parts or [part for part in PARTS if part not in NEEDS_A_DEVICE]:
        module = importlib.import_module(f"tests.benchmarks.{PARTS[part]}")
        console.print(module.table(options.quick))
        console.print()


if __name__ == "__main__":
    main()
