"""Options of mpirun as data: the user's text parsed, then merged with what the launch itself needs.

`custom_mpi_options` is a line that people copy from one job to the next, written for the Open MPI of
some image. Three things go wrong with it, and are settled here instead of in mpirun's messages:

* Spelling. Open MPI 4 takes `-bind-to none`; version 5 reads this as a program named "none". Every
  option gets the one spelling that both versions take.
* Repetition. Open MPI 4 refuses an MCA parameter that is listed twice, even with the same value, and
  version 5 where the values differ; for `-x` the last one wins in silence. So a setting that stands
  there twice with one value is passed once. With two values it is an error that names both, unless
  ours was a mere default: then the user's is taken.
* Reach. mpirun takes the first word that it does not know for the program, and some options would
  start something else than the job. Only options whose meaning and length are known are passed.

The values of MCA parameters are limited to letters, digits and a few signs. mpirun hands them to the
other hosts within a line for a shell, in double quotes, where `$(...)` would be executed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["MpiOption", "export", "flag", "mca", "merge_options", "parse_options"]

_PARAMETER = "custom_mpi_options"


@dataclass(frozen=True)
class MpiOption:
    """One option of mpirun.

    setting: what it sets; two options with the same setting contradict or repeat each other.
    value: to what; None for a bare switch, and for a variable exported as it is.
    words: what stands on the command line.
    is_default: whether the user may decide otherwise.
    """

    setting: str
    value: str | None
    words: tuple[str, ...]
    is_default: bool = False

    def as_default(self) -> MpiOption:
        """The same, yielding to what the user says."""
        return replace(self, is_default=True)

    def __str__(self) -> str:
        return " ".join(self.words)


def mca(name: str, value: str, kind: str = "--mca") -> MpiOption:
    """An MCA parameter; `kind` is the option that sets it, such as `--prtemca`."""
    return MpiOption(f"--mca {_current_name(name)}", value, (kind, name, value))


def export(name: str, value: str | None = None) -> MpiOption:
    """An environment variable for all ranks; a value of None is that of mpirun's own environment,
    which keeps it off the command line."""
    return MpiOption(f"-x {name}", value, ("-x", name if value is None else f"{name}={value}"))


def flag(name: str, value: str | None = None) -> MpiOption:
    """Any other option, by its long name with two dashes."""
    return MpiOption(name, value, (name,) if value is None else (name, value))


def parse_options(text: str, mpi_major: int) -> tuple[MpiOption, ...]:
    """The options in `text`, split as a shell would do, for mpirun of Open MPI `mpi_major`.

    Left out are those that ask for what happens anyway, such as `--tag-output`.

    Raises ValueError, naming the option and the way out, where one is unknown, incomplete, or not
    the user's to set.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise _complaint(repr(text), f"cannot be split into words ({error}): close the quotation") from None
    return tuple(_parse_words(iter(words), mpi_major))


def merge_options(ours: Iterable[MpiOption], users: Iterable[MpiOption]) -> tuple[MpiOption, ...]:
    """The options of both, each setting once: ours in their order, then the rest of the user's.

    Raises ValueError where two options set one thing to different values and ours is no default.
    """
    merged = {option.setting: option for option in ours}
    given: dict[str, MpiOption] = {}
    for option in users:
        before = given.setdefault(option.setting, option)
        if before.value != option.value:
            raise _complaint(f"{before} and {option}", "contradict each other: keep one of them")
        own = merged.get(option.setting)
        if own is None or own.is_default:
            merged[option.setting] = option
        elif own.value != option.value:
            raise _complaint(str(option), f"contradicts {own}, which the launch itself needs: leave it out")
    return tuple(merged.values())


# What the user may write, each by its long name without dashes.

_SHORT = {"H": "host", "c": "np", "n": "np", "q": "quiet", "v": "verbose"}
_MCA_KINDS = {4: frozenset({"mca", "gmca"}), 5: frozenset({"mca", "gmca", "omca", "prtemca", "pmixmca"})}
_SWITCHES = frozenset(
    {"display-allocation", "display-map", "report-bindings", "use-hwthread-cpus", "verbose"}
)
_VALUED = frozenset({"bind-to", "map-by", "np"})
_ALREADY_SO = frozenset({"allow-run-as-root", "oversubscribe", "tag-output"})
"""Every line carries its rank, root may run, and there are as many slots as ranks."""

_LAYOUT = "which rank runs on which host is decided by the launch: use placement_strategy instead"
_HOSTS = "the hosts are those of the job: use instance_count instead"
_REACH = "which hosts take part, and how they are reached, is decided by the launch: leave it out"
_PROGRAM = "what runs, and where, is decided by the job: use entry_point and source_dir instead"
_OUTPUT = "the launch itself reads what mpirun and the ranks print: leave it out"
_FILE = "settings in files cannot be compared with those of the launch: write them as --mca NAME VALUE"
_TEXT = "mpirun would print a text instead of starting the job: leave it out"

_REFUSED = {
    **dict.fromkeys(("N", "npernode", "pernode", "npersocket", "ppr"), _LAYOUT),
    **dict.fromkeys(("rank-by", "rankfile", "rf", "bynode", "bycore", "nolocal", "nooversubscribe"), _LAYOUT),
    **dict.fromkeys(
        ("host", "hostfile", "machinefile", "default-hostfile", "add-host", "add-hostfile"), _HOSTS
    ),
    **dict.fromkeys(("app", "wdir", "wd", "path", "preload-binary", "preload-files", "s"), _PROGRAM),
    **dict.fromkeys(("set-cwd-to-session-dir", "do-not-launch", "dvm", "xterm", "debug", "tv"), _PROGRAM),
    **dict.fromkeys(("prefix", "noprefix", "launch-agent", "personality"), _REACH),
    **dict.fromkeys(("output", "output-filename", "merge-stderr-to-stdout", "xml", "xml-file"), _OUTPUT),
    **dict.fromkeys(("timestamp-output", "stdin", "display", "quiet"), _OUTPUT),
    **dict.fromkeys(("am", "tune"), _FILE),
    **dict.fromkeys(("h", "help", "V", "version"), _TEXT),
}

_MCA_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_MCA_REFUSED = re.compile(r"plm|ras|rmaps(_\w+)?|\w+_[rs]sh_(agent|args)|\w+_(launch_agent|default_hostfile)")
_MCA_VALUE = re.compile(r"[\w.,:/@%+=^-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OF_THE_HOST = "SM_"
"""How the variables begin that describe the job to a host's ranks."""
_SLOT = frozenset({"slot", ":oversubscribe", "slot:oversubscribe"})


def _parse_words(words: Iterator[str], mpi_major: int) -> Iterator[MpiOption]:
    for word in words:
        name, attached = _split_name(word)
        if name in _REFUSED:
            raise _complaint(word, f"cannot be used: {_REFUSED[name]}")
        if name in _MCA_KINDS[mpi_major]:
            yield _parse_mca(f"--{name}", _take(word, attached, words, 2))
        elif name == "x":
            yield _parse_export(*_take(word, attached, words, 1))
        elif name == "NCCL_DEBUG":  # an option of SageMaker's toolkit, not of mpirun
            yield export(name, *_take(word, attached, words, 1))
        elif name in _VALUED:
            yield _parse_valued(f"--{name}", *_take(word, attached, words, 1))
        elif attached:
            raise _unknown(word)
        elif name in _SWITCHES:
            yield flag(f"--{name}")
        elif name not in _ALREADY_SO:
            raise _unknown(word)


def _split_name(word: str) -> tuple[str, list[str]]:
    """The long name of an option, and the value attached to it by "=", if any."""
    if not word.startswith("-"):
        raise _complaint(
            repr(word),
            "is no option, and mpirun would run it as a program; values must follow their option, "
            "and values with spaces must be in quotation marks",
        )
    name, sign, value = word.lstrip("-").partition("=")
    return _SHORT.get(name, name), [value] if sign else []


def _take(word: str, attached: list[str], words: Iterator[str], count: int) -> list[str]:
    values = attached + [value for _, value in zip(range(count - len(attached)), words)]
    # mpirun cuts its command line at a lone colon before it reads any option.
    if len(values) < count or ":" in values:
        kind = "value" if count == 1 else "name and value"
        raise _complaint(" ".join([word, *values]), f"is incomplete: a {kind} must follow {word}")
    return values


def _parse_mca(kind: str, words: Sequence[str]) -> MpiOption:
    name, value = words
    if not _MCA_NAME.fullmatch(name):
        raise _complaint(f"{kind} {name} {value}", f"cannot be used: {name!r} is not the name of a parameter")
    if _MCA_REFUSED.fullmatch(name):
        raise _complaint(f"{kind} {name} {value}", f"cannot be used: {_REACH}")
    if not _MCA_VALUE.fullmatch(value):
        raise _complaint(
            f"{kind} {name} {value!r}",
            "cannot be used: on its way to other hosts the value passes through a shell, so only letters, "
            "digits and the signs . , : / @ % + = ^ - _ may be in it",
        )
    return mca(name, value, "--mca" if kind == "--gmca" else kind)


def _parse_export(word: str) -> MpiOption:
    name, sign, value = word.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise _complaint(f"-x {word}", f"cannot be used: {name!r} is not the name of an environment variable")
    if name.startswith(_OF_THE_HOST):
        raise _complaint(
            f"-x {name}", "cannot be used: each host has its own value, and its ranks get that; leave it out"
        )
    if "\0" in word:
        raise _complaint(f"-x {word!r}", "cannot be used: there is a NUL character in it")
    return export(name, value if sign else None)


def _parse_valued(name: str, value: str) -> MpiOption:
    if name == "--map-by":
        if value.lower() not in _SLOT:
            raise _complaint(f"{name} {value}", f"cannot be used: {_LAYOUT}")
        value = "slot"
    return flag(name, value)


def _current_name(name: str) -> str:
    """The name in Open MPI 5 of an MCA parameter that was renamed since version 4; include and
    exclude of the same interfaces count as one, since they may not both be given."""
    for old, new in (("btl_vader_", "btl_sm_"), ("plm_rsh_", "plm_ssh_"), ("oob_tcp_if_", "prte_if_")):
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name.replace("_if_exclude", "_if_include")


def _unknown(word: str) -> ValueError:
    known = sorted({"mca NAME VALUE", "x NAME[=VALUE]", "bind-to POLICY", *_SWITCHES})
    names = ", ".join(("-" if name.startswith("x ") else "--") + name for name in known)
    return _complaint(word, f"is not an option that can be passed on to mpirun; these are: {names}")


def _complaint(subject: str, text: str) -> ValueError:
    return ValueError(f"{_PARAMETER}: {subject} {text}")
