"""What each process of a local launch runs before it becomes the script.

It does six things and then gets out of the way:

* It moves its standard output and error onto this rank's own channels (the launcher's named pipes,
  or for rank 0 a terminal), so the launcher knows who wrote what, and a script that asks whether it
  writes to a terminal gets the right answer.
* It listens for the notice that the job is about to be stopped, which `smp.should_stop()` tells.
* It takes the environment of its host where one machine plays several.
* It makes the package `smdistributed` importable, for scripts of SMP v1.
* It runs the script so that it sees what `python script.py args` gives.
* If the script fails it leaves a failure record and ends at once. It must not leave the normal way:
  on exit mpi4py calls MPI_Finalize, which waits for peers that in turn wait for this rank.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import runpy
import sys
import threading
import traceback
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

from smp_lite import stop_notice
from smp_lite.errors_record import ERROR_DIR_VARIABLE, headline_of, record_failure
from smp_lite.smp_v1.before_script import CUDA_AS_CPU_VARIABLE, prepare

from .hosts.one_machine import enter_host
from .mpi.rank_command import decode_words

__all__ = ["main"]

_FLUSH_S = 2.0
_NO_CUDA = ("not compiled with CUDA enabled", "attribute '_cuda_", "CUDA support, but CUDA not available")
_OUR_FRAMES = frozenset({__file__, "<frozen runpy>"})


def main(argv: list[str]) -> None:
    """Run `argv`, which is `script args...` or `-m module args...`, or encodes one of these, as this rank."""
    argv = decode_words(argv)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    run_dir = Path(os.environ[ERROR_DIR_VARIABLE])
    # Before the process id is told: the notice would end a process that does not listen.
    stop_notice.listen()
    (run_dir / f"rank{rank}.pid").write_text(str(os.getpid()))
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        channel = os.open(run_dir / f"rank{rank}.{stream}", os.O_WRONLY | os.O_NOCTTY)
        os.dup2(channel, descriptor)
        os.close(channel)
    process = os.getpid()
    try:
        enter_host(rank)
        prepare(os.environ)
        if argv[0] == "-m":
            _run_module(argv[1], argv[2:])
        else:
            _run_script(argv[0], argv[1:])
    except BaseException as error:
        if os.getpid() != process:
            _end_child(error)
            raise
        _end(error, rank)
    if os.getpid() != process:
        _end_child(None)


def _end_child(error: BaseException | None) -> None:
    """End a child that the script has forked, which is not this rank, as Python would; but for MPI.

    mpi4py would end MPI, which the child has from its parent: it would wait for the other ranks forever, and
    work in the memory that the rank shares with them, which has ended ranks by SIGSEGV. Where MPI is not
    loaded this returns: the child ends the normal way.
    """
    if "mpi4py.MPI" not in sys.modules:
        return
    code, text = 0, ""
    if isinstance(error, SystemExit):
        code, text = _exit_code(error.code)
        text = "" if isinstance(error.code, int) else text
    elif error is not None:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.write(text)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
    atexit._run_exitfuncs()
    _flush_files()
    os._exit(code)


def _end(error: BaseException, rank: int) -> None:
    """End this rank as `error`, which the script has let pass, wants it."""
    if isinstance(error, SystemExit):
        code, text = _exit_code(error.code)
        if code != 0:
            _fail(text, rank, code, text)
    else:
        _call_custom_hook(error, rank)
        _fail(_traceback_text(error) + _advice(error), rank, 1, headline_of(error))


def _run_script(script: str, args: list[str]) -> None:
    """As `python script args`: the module stays in place afterwards, for exit handlers and
    pickling, which is why this is not `runpy.run_path`."""
    path = os.path.abspath(script)
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = [script, *args]
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)


def _run_module(name: str, args: list[str]) -> None:
    """As `python -m name args`."""
    sys.argv = [name, *args]
    _set_first_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_path(directory: str) -> None:
    # This process was started with -P; the user may have asked for the same by this variable.
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, directory)


def _exit_code(code: object) -> tuple[int, str]:
    """The exit status for `sys.exit(code)`, and what to say, by Python's own rules."""
    if code is None:
        return 0, ""
    if isinstance(code, int):
        return code & 0xFF, f"sys.exit({code})\n"
    return 1, f"{code}\n"


def _traceback_text(error: BaseException) -> str:
    """The traceback as a plain run of the script would print it, without this file's frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FRAMES:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _advice(error: BaseException) -> str:
    """What a script may be told that speaks of CUDA on a machine without."""
    text = f"{error}"
    if not any(words in text for words in _NO_CUDA):
        return ""
    return (
        "(The script speaks of CUDA, and this torch has none. smp-lite run --cuda-as-cpu, or in a job "
        f"{CUDA_AS_CPU_VARIABLE}=1, lets it mean the CPU.)\n"
    )


def _call_custom_hook(error: BaseException, rank: int) -> None:
    """A hook that the script installed gets its call, after the record is safe."""
    if sys.excepthook is sys.__excepthook__:
        return
    record_failure(_traceback_text(error), rank, headline=headline_of(error))
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        pass  # the record has the exit code of an exception
    except Exception:
        traceback.print_exc()


def _fail(text: str, rank: int, code: int, headline: str) -> None:
    record_failure(text, rank, code, headline)
    # In a thread, because what it writes to may not take it.
    flushing = threading.Thread(target=_flush_files, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(code)


def _flush_files() -> None:
    """Write out what open files still hold back, as the end of a process does."""
    for kind in (io.TextIOBase, io.BufferedIOBase):  # the first write into the second
        # By type(), because isinstance() also asks the object, and any object may be among these.
        for file in [found for found in gc.get_objects() if issubclass(type(found), kind)]:
            try:
                file.flush()
            except Exception:  # closed, half made, or its reader has gone
                continue


if __name__ == "__main__":
    main(sys.argv[1:])
