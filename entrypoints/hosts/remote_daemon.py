"""mpirun's daemon on another host: who starts it in the place of ssh, and with what.

mpirun runs the program of `write_agent` for each other host. That hands the daemon's arguments to the
`train` process which waits there (`network.HostService`), and stays until the daemon has ended.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .connection import StrangerError, connect

__all__ = ["daemon_environment", "parse_daemon_command", "read_settings", "run_daemon_on", "write_agent"]

_DAEMONS = ("prted", "orted")


def run_daemon_on(host: str, arguments: Sequence[str], key: bytes, port: int) -> int:
    """Have `host` start mpirun's daemon and stay until it ends; returns its exit code.

    Raises:
        ConnectionError: the host does not answer.
    """
    try:
        connection = connect(host, port, key)
    except StrangerError:
        raise ConnectionError(f"host {host} answers on port {port}, but with another key") from None
    if connection is None:
        raise ConnectionError(f"host {host} does not answer on port {port}")
    with connection:
        message = {"call": "daemon", "arguments": list(arguments)}
        # As long as the job takes: mpirun ends this process when it has enough of it.
        return int(connection.call(message, limit_s=None)["exit_code"])


def parse_daemon_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The host and the daemon's arguments from what mpirun gives the program that it takes for ssh.

    That is the host and a text for a shell: assignments, exports, and last the daemon with arguments.

    Raises:
        ValueError: it is something else.
    """
    at = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    host = words[at] if at < len(words) else ""
    lexer = shlex.shlex(" ".join(words[at + 1 :]), posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    command: list[str] = []
    for token in lexer:
        command = [] if set(token) == {";"} else [*command, token]
    if not command or Path(command[0]).name not in _DAEMONS:
        raise ValueError(f"mpirun asks to start {command[:1]} on {host}, which is not its daemon")
    return host, command[1:]


def write_agent(directory: Path, key: bytes, port: int) -> Path:
    """The program that mpirun takes for ssh, as an executable file: mpirun wants a single word.

    Args:
        directory: which only this user can read.
        key: of the job. It stays in a file beside the program: a command line, every user of a machine can
            read, and what stands in mpirun's environment goes to the ranks.
        port: on which the other hosts listen.
    """
    settings = directory / "host-agent.json"
    settings.touch(mode=0o600)
    settings.write_text(json.dumps({"key": key.hex(), "port": port}))
    path = directory / "host-agent"
    words = (sys.executable, "-P", "-m", "smp_lite.entrypoints.host_agent", str(settings))
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o700)
    return path


def read_settings(path: Path) -> tuple[bytes, int]:
    """The key and the port that `write_agent` has left."""
    settings = json.loads(path.read_text())
    return bytes.fromhex(settings["key"]), settings["port"]


def daemon_environment(mpirun: str) -> dict[str, str]:
    """What the daemon needs to find its own files, wherever Open MPI is installed."""
    prefix = str(Path(mpirun).parent.parent)
    return {"PRTE_PREFIX": prefix, "PMIX_PREFIX": prefix, "OPAL_PREFIX": prefix}
