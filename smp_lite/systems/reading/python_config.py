"""Runs a Python configuration file, as LiBai and Colossal-AI have them, without those libraries.

The file is the user's own program and runs as such. Its imports are resolved here: a relative one
(``from .common.train import train``) to the sibling file where that exists; anything that is not installed,
and always the two libraries themselves, to :class:`~.python_tree.Unknown` values. ``train`` from a file that
is not there is LiBai's default tree, so the examples of its documentation run as they are.
"""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config.errors import ConfigError
from .python_tree import Tree, Unknown
from .texts import read_text

__all__ = ["PythonConfig", "names_in", "run_python_config"]

#: Libraries of configuration files. They are never imported: their objects would not be plain values.
_STAND_INS = ("libai", "oneflow", "omegaconf", "colossalai")


class PythonConfig:
    """The outcome of a run.

    Attributes:
        variables: what the file defines, without modules, functions and classes.
        unknown: what it takes from files that are not there, by name.
        warnings: what stood in for a file that is not there.
    """

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        self.unknown: dict[str, Unknown] = {}
        self.warnings: list[str] = []


def names_in(text: str, name: str) -> set[str]:
    """Returns the variables that a file sets or imports, or whose attributes it sets; it does not run."""
    try:
        tree = ast.parse(text, name)
    except SyntaxError as error:
        raise ConfigError(f"{name} is not valid Python: {error}") from None
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            base: ast.expr = node
            while isinstance(base, ast.Attribute | ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                found.add(base.id)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def run_python_config(
    path: Path, default_train: Callable[[], Mapping[str, Any]] | None = None
) -> PythonConfig:
    """Runs a file and returns what it defines.

    Args:
        path: of the file.
        default_train: makes the tree for ``train`` where its file is not there; None: there is none.

    Raises:
        ConfigError: the file cannot be run.
    """
    return _Runner(default_train).run(path)


class _Runner:
    def __init__(self, default_train: Callable[[], Mapping[str, Any]] | None) -> None:
        self._default_train = default_train
        self._files: dict[Path, dict[str, Any]] = {}
        self._config = PythonConfig()

    def run(self, path: Path) -> PythonConfig:
        variables = self._namespace(path, {"model": Unknown("model", "the file does not say what it is")})
        kinds = (types.ModuleType, types.FunctionType, type, Unknown, types.SimpleNamespace)
        self._config.variables = {
            name: value
            for name, value in variables.items()
            if not name.startswith("_") and not isinstance(value, kinds)
        }
        self._config.unknown = {
            name: value for name, value in variables.items() if isinstance(value, Unknown)
        }
        return self._config

    def _namespace(self, path: Path, start: Mapping[str, Any] = types.MappingProxyType({})) -> dict[str, Any]:
        resolved = path.resolve()
        if resolved in self._files:
            return self._files[resolved]
        own_builtins = {**vars(builtins), "__import__": self._importer(path)}
        namespace = {"__builtins__": own_builtins, "__file__": str(path), "__name__": path.stem, **start}
        self._files[resolved] = namespace
        try:
            exec(compile(read_text(path), str(path), "exec"), namespace)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit would end us without a word
            line = next((f":{n}" for n in _lines(error, str(path))), "")
            raise ConfigError(f"{path}{line} cannot be run: {type(error).__name__}: {error}") from error
        for name, value in namespace.items():
            if isinstance(value, Mapping) and not isinstance(value, Tree) and not name.startswith("__"):
                namespace[name] = Tree(value, str(path))
        return namespace

    def _importer(self, importing: Path) -> Callable[..., Any]:
        def import_(
            name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            if level:
                return self._relative(importing, name, tuple(fromlist or ()), level)
            if name.partition(".")[0] not in _STAND_INS:
                try:
                    return builtins.__import__(name, globals_, locals_, fromlist or (), 0)
                except ModuleNotFoundError as error:
                    if error.name != name and not name.startswith(f"{error.name}."):
                        raise
            top = name.partition(".")[0]
            full = name if fromlist else top
            self._warn(f"{importing} imports {name}, which is not needed here and was not loaded")
            return self._stand_in(importing, full)

        return import_

    def _stand_in(self, importing: Path, name: str) -> Any:
        module = Unknown(name, f"{name} was not loaded")
        object.__setattr__(module, "LazyCall", lambda target: lambda **values: Tree(values, str(importing)))
        object.__setattr__(module, "DictConfig", lambda values: Tree(values, str(importing)))
        object.__setattr__(module, "ListConfig", list)
        object.__setattr__(module, "get_config", lambda path: self._get_config(importing, path))
        return module

    def _get_config(self, importing: Path, path: str) -> Any:
        for folder in (importing.parent, *importing.parent.parents):
            for file in (folder / path, folder / "configs" / path):
                if file.is_file():
                    return types.SimpleNamespace(**_public(self._namespace(file)))
        return self._missing(importing, path, ("train",))

    def _relative(self, importing: Path, name: str, fromlist: tuple[str, ...], level: int) -> Any:
        folder = importing.parent
        for _ in range(level - 1):
            folder = folder.parent
        target = folder.joinpath(*filter(None, name.split(".")))
        for file in (target.with_suffix(".py"), target / "__init__.py"):
            if file.is_file():
                found = self._namespace(file)
                absent = [wanted for wanted in fromlist if wanted != "*" and wanted not in found]
                if absent:
                    raise ImportError(f"{file} does not define {absent[0]!r}")
                return types.SimpleNamespace(**_public(found))
        return self._missing(importing, f"{'.' * level}{name}", fromlist)

    def _missing(self, importing: Path, name: str, wanted: tuple[str, ...]) -> Any:
        values: dict[str, Any] = {}
        for variable in wanted:
            if variable == "train" and self._default_train is not None:
                # Without an origin: nobody said these values.
                values[variable] = Tree(self._default_train())
                self._warn(
                    f"{importing} imports train from {name}, which is not there: LiBai's defaults stand in"
                )
            else:
                values[variable] = Unknown(
                    variable, f"{importing} imports it from {name}, which is not there"
                )
        return types.SimpleNamespace(**values)

    def _warn(self, text: str) -> None:
        if text not in self._config.warnings:
            self._config.warnings.append(text)


def _public(namespace: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in namespace.items() if not name.startswith("__")}


def _lines(error: BaseException, path: str) -> list[int]:
    """Lines of `path` in the error's traceback, the innermost first."""
    if isinstance(error, SyntaxError):
        return [error.lineno] if error.lineno else []
    found = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found.insert(0, trace.tb_lineno)
        trace = trace.tb_next
    return found
