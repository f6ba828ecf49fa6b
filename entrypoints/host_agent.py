"""What mpirun runs in place of ssh to start its daemon on another host (see `hosts.remote_daemon`).

python -m smp_lite.entrypoints.host_agent HOST "...; .../prted ARGUMENTS"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .hosts.network import KEY_VARIABLE, PORT_VARIABLE
from .hosts.remote_daemon import parse_daemon_command, run_daemon_on

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Start the daemon and stay until it has ended; returns its exit code."""
    try:
        host, arguments = parse_daemon_command(argv)
        key, port = os.environ[KEY_VARIABLE].encode(), int(os.environ[PORT_VARIABLE])
        return run_daemon_on(host, arguments, key, port)
    except (ValueError, OSError, EOFError) as error:
        print(f"smp-lite: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
