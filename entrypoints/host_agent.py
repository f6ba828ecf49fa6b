"""What mpirun runs in place of ssh to start its daemon on another host (see `hosts.remote_daemon`).

python -m smp_lite.entrypoints.host_agent SETTINGS HOST "...; .../prted ARGUMENTS"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .hosts.remote_daemon import parse_daemon_command, read_settings, run_daemon_on

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Start the daemon and stay until it has ended; returns its exit code."""
    try:
        key, port = read_settings(Path(argv[0]))
        host, arguments = parse_daemon_command(argv[1:])
        return run_daemon_on(host, arguments, key, port)
    except (ValueError, OSError, EOFError) as error:
        print(f"smp-lite: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
