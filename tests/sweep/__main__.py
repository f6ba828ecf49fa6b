"""`python -m tests.sweep`: runs what is not in the file of results yet, then prints the table."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from pathlib import Path

from tests.sweep.architectures import model_types
from tests.sweep.report import report
from tests.sweep.running import read_results, sweep


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these model types, even if they were run before"
    )
    parser.add_argument("--stages", type=int, default=2, help="partitions of the library's run (2)")
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"), help="file of results (sweep.jsonl)")
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="S", help="for one model, in seconds (60)"
    )
    parser.add_argument("--plain", action="store_true", help="plain torch alone")
    parser.add_argument(
        "--paste", metavar="NAME", help="print a script that does the same for one model type"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.nice(10)
    if options.paste:
        from tests.sweep.paste import script

        print(script(options.paste, options.stages))
        return
    unknown = set(options.only or ()) - set(model_types())
    if unknown:
        parser.error(f"no such model types: {', '.join(sorted(unknown))}")
    done = read_results(options.out)
    names = options.only or [
        name for name in model_types() if done.get(name, {}).get("stages") != options.stages
    ]
    sweep(names, options.out, num_stages=options.stages, timeout_s=options.timeout, plain_only=options.plain)
    results = read_results(options.out)
    print(report({name: results[name] for name in options.only or results}))


if __name__ == "__main__":
    main()
