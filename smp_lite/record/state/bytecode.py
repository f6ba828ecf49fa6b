"""What the code of a function says, without running it.

CPython's instructions are read with :mod:`dis`; of their names only those of loads and stores count, which
have been the same for years.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Collection, Iterable, Iterator

__all__ = ["constant_keys", "names_after", "uses_of_attribute", "variables_around", "with_nested"]

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


def names_after(code: types.CodeType, offset: int) -> set[str]:
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
    return names


def variables_around(code: types.CodeType, but: Collection[types.CodeType] = ()) -> set[str]:
    """Names of variables of enclosing functions that a function uses, and does not only pass on."""
    return {
        instruction.argval
        for part in with_nested(code, but)
        for instruction in dis.get_instructions(part)
        if instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF")
    }


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
    return keys
