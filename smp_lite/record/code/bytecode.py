"""What the code of a function says, without running it.

CPython's instructions are read with :mod:`dis`; of their names only those of loads and stores count, which
have been the same for years.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Collection, Iterable, Iterator

__all__ = [
    "changes_tensors",
    "constant_keys",
    "names_after",
    "names_used",
    "reads_computed_names",
    "returned_by",
    "uses_of_attribute",
    "variables_around",
    "with_nested",
]

_COLLECTS = frozenset(
    ("append", "appendleft", "extend", "insert", "setdefault", "update", "__setitem__", "write", "info")
)
_CONTENTS = ("grad", "data")  # of a tensor
_VIEWS = frozenset((*_CONTENTS, "T", "H", "mT", "mH", "real", "imag"))
_CHANGING = frozenset(("setattr", "step", "zero_grad"))
_MAKES_OWN = ("LOAD_CONST", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_SET", "LIST_EXTEND")
_VARIABLES = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST")
_MAX_KNOWN = 4096
_NO_USES = ("MAKE_CELL", "COPY_FREE_VARS", "LOAD_CLOSURE")  # bookkeeping of variables


def with_nested(code: types.CodeType, but: Collection[types.CodeType] = ()) -> list[types.CodeType]:
    """The code of a function, and of functions that are written in it; without some."""
    if code in but:
        return []
    found = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += with_nested(constant, but)
    return found


@functools.lru_cache(_MAX_KNOWN)
def names_after(code: types.CodeType, offset: int) -> frozenset[str]:
    """What the code mentions after the instruction at ``offset``."""
    instructions = list(dis.get_instructions(code))
    later = [i for i in instructions if i.offset > offset]
    if any("BACKWARD" in i.opname for i in later):  # a loop: what stands before comes again
        later = instructions
    names = {i.argval for i in later if isinstance(i.argval, str)}
    for instruction in later:
        if isinstance(instruction.argval, types.CodeType):
            for part in with_nested(instruction.argval):
                names.update(part.co_names, part.co_freevars)
    return frozenset(names)


def variables_around(code: types.CodeType, but: Collection[types.CodeType] = ()) -> set[str]:
    """Names of variables of enclosing functions that a function uses, and does not only pass on."""
    return set().union(*[_dereferenced(part) for part in with_nested(code, but)])


@functools.lru_cache(_MAX_KNOWN)
def _dereferenced(code: types.CodeType) -> frozenset[str]:
    loads = ("LOAD_DEREF", "LOAD_CLASSDEREF")
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in loads)


def uses_of_attribute(code: types.CodeType, name: str) -> Iterator[tuple[str, bool]]:
    """(instruction, whether it is of the first argument) for each use of an attribute, or of a constant."""
    if name not in code.co_names and name not in code.co_consts:
        return
    owner: object = None
    for instruction in dis.get_instructions(code):
        if instruction.argval == name:
            yield instruction.opname, code.co_varnames[:1] == (owner,)
        owner = instruction.argval


def constant_keys(codes: Iterable[types.CodeType], names: Collection[str]) -> set[str] | None:
    """The strings by which something with these names is subscripted; None if it is also used otherwise."""
    keys: set[str] = set()
    for code in codes:
        if not any(name in (*code.co_names, *code.co_freevars, *code.co_cellvars) for name in names):
            continue
        instructions = list(dis.get_instructions(code))
        for i, instruction in enumerate(instructions):
            if instruction.argval not in names or instruction.opname in _NO_USES:
                continue
            following = instructions[i + 1 : i + 5]
            opnames = [after.opname for after in following if after.opname != "COPY"]  # S["n"] += 1 copies
            if len(opnames) < 2 or opnames[0] != "LOAD_CONST" or not opnames[1].endswith("_SUBSCR"):
                return None
            key = following[0].argval
            if not isinstance(key, str):
                return None
            keys.add(key)
    return keys or None


@functools.lru_cache(_MAX_KNOWN)
def returned_by(code: types.CodeType) -> frozenset[tuple[str, ...]] | None:
    """By what calls a function returns something that may be other than None.

    Returns:
        The names up to each such call (``log.add``); None if it returns more.
    """
    found = set()
    for line in _lines(code):
        if line[-1].opname != "RETURN_VALUE" or _calls_collector(line):
            continue
        value = line[-2] if len(line) > 1 else None
        if value is not None and value.opname == "CALL" and "JUMP" not in "".join(i.opname for i in line):
            found.add(_first_names(line))
        elif value is None or value.opname != "LOAD_CONST" or value.argval is not None:
            return None
    return frozenset(found)


def _first_names(line: list[dis.Instruction]) -> tuple[str, ...]:
    names: list[str] = []
    for instruction in line:
        if instruction.opname == "PUSH_NULL":
            continue
        if instruction.opname not in (("LOAD_ATTR", "LOAD_METHOD") if names else _VARIABLES):
            break
        names.append(instruction.argval)
    return tuple(names)


@functools.lru_cache(_MAX_KNOWN)
def changes_tensors(code: types.CodeType, defaults: frozenset[str] = frozenset()) -> bool:
    """Whether a function could change tensors in place, or set what they hold: ``p.grad.mul_(2)``,
    ``g *= 2``, ``p.grad[0] = 0``, ``optimizer.step()``.

    Args:
        code: of the function, without what is written in it.
        defaults: its arguments that have defaults: they hold what functions keep, and no gradients.
    """
    if any(name in _CHANGING or (name.endswith("_") and name.strip("_")) for name in code.co_names):
        return True
    if any(isinstance(constant, tuple) and "out" in constant for constant in code.co_consts):
        return True
    known = defaults | _own_variables(code)
    for line in _lines(code):
        for i, instruction in enumerate(line):
            opname = instruction.opname
            if opname in ("STORE_ATTR", "DELETE_ATTR") and instruction.argval in _CONTENTS:
                return True
            if opname == "STORE_FAST" and i and _is_inplace(line[i - 1]) and instruction.argval not in known:
                return True
            if opname == "STORE_SUBSCR" and not _fills_container(line, instruction, known):
                return True
    return False


def _is_inplace(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")


def _own_variables(code: types.CodeType) -> frozenset[str]:
    """Local variables that hold nothing but constants, new containers, and what is added to them."""
    found = set(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    for line in _lines(code):
        for i, instruction in enumerate(line):
            if instruction.opname != "STORE_FAST":
                continue
            if not i or not (line[i - 1].opname in _MAKES_OWN or _is_inplace(line[i - 1])):
                found.discard(instruction.argval)
    return frozenset(found)


def _fills_container(line: list[dis.Instruction], store: dis.Instruction, containers: frozenset[str]) -> bool:
    """Of ``a.b[c] = value``: whether ``a.b`` is something around the function, or in it, and no tensor."""
    start = _start(store)
    chain = [instruction for instruction in line if _start(instruction) == start and start[0] is not None]
    if not chain or any(i.opname == "LOAD_METHOD" or i.argval in _VIEWS for i in chain):
        return False
    root, has_attribute = chain[0], any(i.opname == "LOAD_ATTR" for i in chain)
    return root.opname in ("LOAD_GLOBAL", "LOAD_DEREF") or has_attribute or root.argval in containers


def _start(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    """Where in the source an expression begins."""
    positions = instruction.positions
    return (None, None) if positions is None else (positions.lineno, positions.col_offset)


@functools.lru_cache(_MAX_KNOWN)
def names_used(code: types.CodeType, defaults: frozenset[str] = frozenset()) -> frozenset[str]:
    """What a function mentions, but for lines that do nothing but collect: ``counts[name] += 1``.

    Args:
        code: of the function, without what is written in it.
        defaults: its arguments that have defaults.
    """
    return frozenset(
        instruction.argval
        for line in _lines(code)
        if not _only_collects(line, defaults)
        for instruction in line
        if isinstance(instruction.argval, str)
    )


def _lines(code: types.CodeType) -> list[list[dis.Instruction]]:
    """The instructions by source line, in order."""
    found: dict[int, list[dis.Instruction]] = {}
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else None
        if instruction.opname not in _NO_USES and instruction.opname != "RESUME":
            found.setdefault(line or 0, []).append(instruction)
    return list(found.values())


def _calls_collector(line: list[dis.Instruction]) -> bool:
    """seen.append(...)"""
    called = next((i.argval for i in line if i.opname in ("LOAD_METHOD", "LOAD_ATTR")), None)
    return called in _COLLECTS


def _only_collects(line: list[dis.Instruction], defaults: frozenset[str]) -> bool:
    opnames = [i.opname for i in line]
    if any("JUMP" in name or name in ("STORE_FAST", "FOR_ITER", "RETURN_VALUE") for name in opnames[:-1]):
        return False
    last = line[-1]
    if last.opname == "STORE_SUBSCR":
        return _fills_container(line, last, defaults)
    if last.opname == "STORE_ATTR":
        return last.argval not in _CONTENTS
    if last.opname in ("STORE_GLOBAL", "STORE_DEREF"):
        return True
    return last.opname in ("POP_TOP", "RETURN_VALUE") and _calls_collector(line)


@functools.lru_cache(_MAX_KNOWN)
def reads_computed_names(code: types.CodeType) -> bool:
    """Whether a function reads attributes whose names are not in it: ``vars(x)``, ``getattr(x, name)``."""
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.argval in ("__dict__", "vars") and instruction.opname in ("LOAD_ATTR", "LOAD_GLOBAL"):
            return True
        asks = instruction.argval == "getattr" and instruction.opname == "LOAD_GLOBAL"
        if asks and not _has_written_name(instructions[i + 1 :]):
            return True
    return False


def _has_written_name(arguments: list[dis.Instruction]) -> bool:
    """Of ``getattr``: a constant, and at most a default that is only loaded, before the call."""
    constants = [i for i, instruction in enumerate(arguments) if instruction.opname == "LOAD_CONST"]
    calls = [i for i, instruction in enumerate(arguments) if instruction.opname == "PRECALL"]
    if not constants or not calls or calls[0] < constants[0]:
        return False
    only_loads = all(later.opname.startswith("LOAD_") for later in arguments[constants[0] : calls[0]])
    return only_loads and arguments[calls[0]].argval in (2, 3)
