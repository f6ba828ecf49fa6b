"""What the expressions of a module's code give, where its layers give this rank's part of the features.

:mod:`.following` goes through the statements; here stand the rules for values, and the refusals.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ...errors import SMPError
from .draws import draws, module_draws
from .functions import ABOUT, ACTIVATIONS, CUTS, MAKES, MIXES, NUMBERS, REDUCES, RESHAPES
from .heads import HEAD_COUNTS
from .marks import (
    FLAT,
    LAST,
    NONE,
    PACKED,
    PART,
    ROW,
    SIZED,
    TRAINED,
    WIDTH,
    Marks,
    cuts_last,
    given_by,
    own_name,
    sizes_at,
    sizes_of,
    union_of,
)
from .source import scope_of
from .styles import Style

__all__ = ["Expressions"]

_OF_PARTS = frozenset({PART, SIZED, LAST})
_TAKE_LISTS = frozenset({"einsum", "cat", "concat", "concatenate", "hstack", "column_stack"})
_WHOLE = (
    "name the layers before it as 'colwise_gather_output', and the layer after it as 'rowwise_split_input'"
)
_WAY_OUT = f"all ranks would draw the same for their parts, where one process draws for all: {_WHOLE}"


class Expressions:
    """Values of one forward.

    Args:
        name: of the module.
        owner: the module.
        styles: of modules and parameters in it, by their names there.
    """

    def __init__(self, name: str, owner: nn.Module, styles: Mapping[str, Style]) -> None:
        self.name, self.owner, self.styles = name, owner, styles
        self.modules = dict(owner.named_modules())
        self.values: dict[str, Marks] = {}
        self.numbers: dict[str, float] = {}
        self.scope: Mapping[str, Any] = scope_of(type(owner).forward)
        self.seen: set[str] = set()

    def run_method(self, name: str, node: ast.Call, given: Marks | None = None) -> Marks | None:
        raise NotImplementedError  # of the class that goes through statements

    def call_inside(
        self,
        name: str,
        module: nn.Module,
        styles: Mapping[str, Style],
        given: Marks,
        node: ast.Call | None,
    ) -> Marks | None:
        raise NotImplementedError  # of the class that goes through statements

    def call_outside(self, function: Callable[..., Any], node: ast.Call) -> None:
        raise NotImplementedError  # of the class that goes through statements

    def call_within(self, name: str, module: nn.Module, node: ast.Call | None) -> None:
        raise NotImplementedError  # of the class that goes through statements

    def known(self, test: ast.expr) -> bool | None:
        raise NotImplementedError  # of the class that goes through statements

    def bind(self, target: ast.expr, marks: Marks) -> None:
        raise NotImplementedError  # of the class that goes through statements

    def marks(self, node: ast.expr | None) -> Marks:
        if node is None or isinstance(node, ast.Constant):
            return NONE
        if isinstance(node, ast.Name):
            return self.values.get(node.id, NONE)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Subscript):
            marks = self.marks(node.value)
            if FLAT in marks and cuts_last(node.slice):
                self.refuse_cut(ast.unparse(node))
            return sizes_at(marks, node.slice) if marks & {SIZED, LAST} and PART not in marks else marks
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return union_of(self.marks(each) for each in node.elts)
        if isinstance(node, ast.IfExp):
            chosen = self.known(node.test)
            if chosen is not None:
                return self.marks(node.body if chosen else node.orelse)
            self.check_test(node.test)
            return self.marks(node.body) | self.marks(node.orelse)
        if isinstance(node, ast.GeneratorExp | ast.ListComp):
            for generator in node.generators:
                self.bind(generator.target, self.marks(generator.iter))
            return self.marks(node.elt)
        if isinstance(node, ast.BinOp):
            left, right = self.marks(node.left), self.marks(node.right)
            if isinstance(node.op, ast.MatMult):
                self.check_mixed(left, [left, right], "@", node)
            return self.meet([left, right], node)
        if isinstance(node, ast.NamedExpr):
            marks = self.marks(node.value)
            self.bind(node.target, marks)
            return marks
        if isinstance(node, ast.Lambda | ast.JoinedStr | ast.Compare | ast.BoolOp):
            return NONE
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return self.meet([self.marks(child) for child in children], node)

    def attribute(self, node: ast.Attribute) -> Marks:
        own = own_name(node)
        if own is not None:
            holder, _, last = own.rpartition(".")
            module = self.modules.get(holder)
            parameter = None if module is None else module._parameters.get(last)
            style = self.styles.get(own)
            if parameter is None:
                counts = last in HEAD_COUNTS or (style is not None and style.kind == "number")
                return frozenset({SIZED}) if counts else NONE
            if style is None or style.kind not in ("column", "row"):
                return frozenset({TRAINED}) if style is None else NONE
            if parameter.dim() == 1:
                return frozenset({PART})
            if style.kind == "row":
                return frozenset({ROW})
            return given_by(style)
        marks = self.marks(node.value)
        if node.attr == "shape":
            return sizes_of(marks)
        if node.attr == "nbytes" and PART in marks:
            return frozenset({SIZED, WIDTH})
        return NONE if node.attr in ABOUT else marks

    def call(self, node: ast.Call) -> Marks:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            own = own_name(node.func)
            if own is not None and own not in self.modules and hasattr(type(self.owner), own):
                found = self.run_method(own, node)
                if found is not None:
                    return found
            if own is not None and own in self.modules:
                return self.call_module(own, union_of(self.marks(each) for each in arguments), node)
            if own is None:
                base = self.marks(node.func.value)
                method = node.func.attr
                if method == "size" and base:
                    sizes = sizes_of(base)
                    return sizes_at(sizes, node.args[0]) if sizes and node.args else sizes
                if method in ("numel", "nelement") and PART in base:
                    return frozenset({SIZED, WIDTH})
                if method in ABOUT:
                    return NONE
                module_function = isinstance(node.func.value, ast.Name | ast.Attribute) and not base
                cut = self.marks(node.args[0]) if module_function and node.args else base
                if method in RESHAPES:
                    return cut - {FLAT, PACKED}
                if method in CUTS and FLAT in cut:
                    self.refuse_cut(ast.unparse(node))
                if method in REDUCES and cut & {FLAT, PACKED}:
                    self.refuse(
                        f"takes {method} of this rank's part of the features, in "
                        f"{ast.unparse(node)[:120]!r}, where it took that of all: {_WHOLE}"
                    )
                given = [self.marks(each) for each in arguments]
                self.check_draws(node, union_of([base, *given]))
                if module_function and PART in union_of(given):
                    self.check_keywords(node)
                found = self.meet(given if method in MAKES else [base, *given], node)
                if method in MIXES:
                    self.check_mixed(union_of(given) if method in _TAKE_LISTS else cut, given, method, node)
                return _number_of(found) if method in NUMBERS else found - {WIDTH}
        else:
            self.marks(node.func)
            if ast.unparse(node.func) == "len":
                return NONE
        given = [self.marks(each) for each in arguments]
        if isinstance(node.func, ast.Name) and node.func.id not in self.values:
            called = node.func.id
            first = given[0] if given else NONE
            if called in RESHAPES:
                return first - {FLAT, PACKED}
            if called in MIXES:
                self.check_mixed(union_of(given) if called in _TAKE_LISTS else first, given, called, node)
        self.check_draws(node, union_of(given))
        marks = self.meet(given, node)
        for each in arguments:
            handed = own_name(each)
            if handed is not None and handed not in self.modules:
                found = self.run_method(handed, node, marks)
                marks = marks if found is None else found
        if PART in marks:
            for each in arguments:
                self.check_rate(each)
            self.check_keywords(node)
        is_number = isinstance(node.func, ast.Name) and node.func.id in NUMBERS
        return _number_of(marks) if is_number else marks - {WIDTH}

    def call_module(self, name: str, given: Marks, node: ast.Call | None = None) -> Marks:
        style, module = self.styles.get(name), self.modules[name]
        self.seen.add(name)
        if style is not None and style.kind == "tail":
            return NONE  # its gradients are seen to
        if style is not None and (style.gives_parts or style.kind in ("row", "summands", "summed")):
            return given_by(style) if style.gives_parts else frozenset({TRAINED})
        inside = {
            other[len(name) + 1 :]: s for other, s in self.styles.items() if other.startswith(f"{name}.")
        }
        if style is None and inside:
            found = self.call_inside(name, module, inside, given, node)
            if found is not None:
                return found
        trained = any(True for _ in module.parameters())  # frozen ones too: they may be thawed
        if PART not in given:
            return frozenset({TRAINED}) if trained else given
        if style is not None and style.kind in ("partial", "dropout"):
            return given
        if trained:
            self.refuse(
                f"gives this rank's part of the features to {name} ({type(module).__name__}), whose "
                "parameters are whole: their gradients would lack the other ranks' contributions. If it "
                "works on each head "
                f'by itself, add "{self.name}.{name}": "replicated_with_grad_allreduce" to the plan, else '
                "name "
                "the layers before it as 'colwise_gather_output'"
            )
        if type(module) is nn.Dropout and module.p:
            self.refuse(
                f"applies dropout ({name}, p={module.p}) to this rank's part of the features: the masks "
                "would not be those of the whole model. Set it to 0, or, between a colwise and a rowwise "
                "layer, add "
                f'"{self.name}.{name}": "local_dropout" to the plan'
            )
        by_element = (*ACTIVATIONS, nn.Threshold, nn.Unflatten, nn.modules.dropout._DropoutNd)
        is_torchs = type(module).__module__.startswith("torch.nn.") and not any(module.children())
        if is_torchs and given & {FLAT, PACKED} and not isinstance(module, by_element):
            self.refuse(
                f"gives this rank's part of the features to {name} ({type(module).__name__}), which looks at "
                f"several of them where it looked at all: {_WHOLE}"
            )
        drawn = module_draws(name, module)
        if drawn is not None:
            self.refuse(f"{drawn} on this rank's part of the features: {_WAY_OUT}")
        self.call_within(name, module, node)
        return given

    def check_draws(self, node: ast.Call, given: Marks) -> None:
        """What is drawn for a part, or in the sizes of one, by torch or in functions that the code calls."""
        if not given & _OF_PARTS:
            return
        function = self.found(node.func)
        if inspect.isfunction(function) and not (function.__module__ or "").startswith("torch."):
            return self.call_outside(function, node)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        drawn = draws(getattr(function, "__name__", called), node, self.rate)
        if drawn is not None:
            self.refuse(f"{drawn} on this rank's part of the features: {_WAY_OUT}")

    def check_keywords(self, node: ast.Call) -> None:
        """Of functions that nothing else is known of."""
        for keyword in node.keywords:
            if keyword.arg and "drop" in keyword.arg and self.rate(keyword.value):
                shown = f"{keyword.arg}={ast.unparse(keyword.value)}"
                self.refuse(f"applies dropout ({shown}) to this rank's part of the features: {_WAY_OUT}")

    def found(self, node: ast.expr) -> Any:
        """What a name, or an attribute of one, is; None: the code does not show it."""
        if isinstance(node, ast.Name):
            return None if node.id in self.values else self.scope.get(node.id)
        if isinstance(node, ast.Attribute):
            holder = self.owner if own_name(node) == node.attr else self.found(node.value)
            return None if holder is None else getattr(holder, node.attr, None)
        return None

    def rate(self, node: ast.expr) -> float | None:
        """The number that an expression stands for, the larger of two; None: the code does not show it."""
        if isinstance(node, ast.Name) and node.id in self.numbers:
            return self.numbers[node.id]
        if isinstance(node, ast.IfExp):
            chosen = self.known(node.test)
            rates = [
                self.rate(each)
                for each, other in ((node.body, False), (node.orelse, True))
                if chosen is not other
            ]
            return None if None in rates else max(each for each in rates if each is not None)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("float", "int", "bool") and node.args:
            return self.rate(node.args[0])
        value = node.value if isinstance(node, ast.Constant) else self.found(node)
        if isinstance(value, nn.Dropout):
            value = value.p
        if ast.unparse(node) == "self.training":
            return 1.0  # it may become so
        return float(value) if isinstance(value, bool | int | float) else None

    def check_rate(self, node: ast.expr) -> None:
        for each in ast.walk(node):
            own = own_name(each) if isinstance(each, ast.Attribute) else None
            if own is None or "drop" not in own:
                continue
            rate = getattr(self.owner, own, 0.0) if "." not in own else 0.0
            if isinstance(rate, nn.Dropout):
                rate = rate.p
            if isinstance(rate, float | int) and rate:
                self.refuse(
                    f"applies dropout (self.{own}={rate}) to this rank's part of the features: the masks "
                    "would not be those of the whole model. Set it to 0 in the model's configuration"
                )

    def meet(self, given: Iterable[Marks], node: ast.AST) -> Marks:
        """Values that one function takes together."""
        marks = list(given)
        union = union_of(marks)
        if ROW in union:
            return NONE
        if WIDTH in union and union & {PART, TRAINED} and isinstance(node, ast.BinOp | ast.AugAssign):
            self.refuse(
                f"computes with the number of this rank's features, in {ast.unparse(node)[:120]!r}, where it "
                f"was that of all: {_WHOLE}"
            )
        if PART in union and any(TRAINED in each and PART not in each for each in marks):
            self.refuse(
                f"lets this rank's part of the features meet whole values, in {ast.unparse(node)[:120]!r}: "
                "the gradients of those would lack the other ranks' contributions. Split the layers that "
                "they come from alike, or name all of them as 'colwise_gather_output'"
            )
        return union - {TRAINED} if PART in union else union

    def check_mixed(self, left: Marks, given: Iterable[Marks], what: str, node: ast.AST) -> None:
        """A function that does not leave each feature where it is, and what it would do that to."""
        joins_batches = isinstance(node, ast.Call) and what.startswith(("cat", "concat")) and _is_first(node)
        if left & {FLAT, PACKED} and not joins_batches and not any(ROW in each for each in given):
            self.refuse(
                f"takes {what} of this rank's part of the features, in {ast.unparse(node)[:120]!r}, where "
                f"all of them met: {_WHOLE}"
            )

    def check_test(self, test: ast.expr) -> None:
        """A condition on how many features there are."""
        for each in ast.walk(test):
            is_value = isinstance(each, ast.Attribute | ast.Call | ast.Name | ast.Subscript)
            if is_value and WIDTH in self.marks(each):
                self.refuse(
                    f"decides by the number of this rank's features, in {ast.unparse(test)[:120]!r}: {_WHOLE}"
                )

    def refuse_cut(self, code: str) -> None:
        self.refuse(
            f"cuts what a colwise layer gives, in {code[:120]!r}, where the whole features would be cut: use "
            "'packed_colwise' (packed_colwise:3 for three equal matrices), or 'colwise_gather_output' and "
            "'rowwise_split_input' for the layer after it"
        )

    def refuse(self, what: str) -> None:
        raise SMPError(f"plan: the code of {self.name} ({type(self.owner).__name__}) {what}")


def _number_of(marks: Marks) -> Marks:
    """What functions make of a number, or of all sizes."""
    return frozenset({SIZED, WIDTH}) if LAST in marks and PART not in marks else marks


def _is_first(node: ast.Call) -> bool:
    """Whether a function of a list works along the first dimension, as far as one can see."""
    named = [keyword.value for keyword in node.keywords if keyword.arg in ("dim", "axis")]
    dims = [*node.args[1:2], *named]
    return not dims or (isinstance(dims[0], ast.Constant) and dims[0].value == 0)
