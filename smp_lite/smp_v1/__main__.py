"""``python -m smp_lite.smp_v1 script.py args...``, or ``-m module args...``: a rank of such a script.

For launchers that start ranks themselves (``mpirun``, ``srun``): as ``python -m mpi4py``, which ends all
ranks when one fails, with the package ``smdistributed`` importable.
"""

from __future__ import annotations

import os
import sys

from .before_script import prepare


def main() -> None:
    from mpi4py.run import main as run

    try:
        prepare(os.environ)
    except ValueError as error:
        sys.exit(f"smp_lite: {error}")
    run()


if __name__ == "__main__":
    main()
