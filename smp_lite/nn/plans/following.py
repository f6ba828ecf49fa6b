"""Follows the outputs of split layers through the source code of the module that uses them.

What a column-parallel layer gives is this rank's part of the features. Elementwise code and reshaping by
heads are right on parts; some other code is not, and would give another result without an error. This reads
the forward of the module around the split layers, statement by statement, and refuses what it recognises:

- functions of all features (a mean, a softmax) on some of them;
- fused outputs that are cut where the whole ones would be (``chunk`` on a ``gate_up_proj``);
- whole parameters, and outputs of layers that are not split, that meet parts: their gradients would lack what
  other ranks contribute;
- dropout and other random functions of parts, whose numbers are not those of the whole model
  (:mod:`.draws`);
- sizes of the whole features, kept as attributes.

It is no proof: code that it cannot see is let pass. The proof is
:func:`~smp_lite.nn.plans.check_parallelized`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from ...errors import SMPError
from .expressions import Expressions
from .heads import HEAD_COUNTS, output_features
from .marks import LAST, NONE, PART, SIZED, TRAINED, WIDTH, Marks, own_name, union_of
from .source import function_of, reads_of, scope_of, words
from .styles import Style

__all__ = ["check_code"]

_OTHER_NUMBERS = words(
    """
    head_dim head_size attention_head_size key_value_proj_dim layer_idx
    relative_attention_num_buckets relative_attention_max_distance
    """
)
"""Attributes that count no split features, even where the number is the same."""

_MAX_DEPTH = 4
"""Of methods that call methods."""


def check_code(
    name: str,
    owner: nn.Module,
    styles: Mapping[str, Style],
    *,
    known: Collection[str],
    shipped: bool,
    summands: bool = False,
    giver: str | None = None,
) -> bool:
    """
    Args:
        name: of the module whose forward uses the split layers.
        owner: that module.
        styles: by names in the owner.
        known: attributes that hold this rank's numbers from now on.
        shipped: the plan came with the model: its authors have looked at sizes.
        summands: the module itself is of that style.
        giver: a module in it that hands on parts, by its name in the owner.

    Returns:
        Whether it hands this rank's part of the features on to the module around it.

    Raises:
        SMPError: the code would not compute what it did, or cannot be seen; says where.
    """
    if not shipped:
        _check_sizes(name, owner, styles, known)
    follower = Follower(name, owner, styles)
    if isinstance(owner, nn.Sequential):
        return PART in follower.sequence(frozenset({TRAINED}))
    tree = function_of(type(owner).forward)
    if tree is not None:
        follower.run(tree, summands=summands)
    unseen = sorted(
        layer
        for layer, style in styles.items()
        if style.gives_parts and layer in follower.modules and layer not in follower.seen
    )
    if unseen and not shipped:
        raise SMPError(
            f"plan: the code of {name} ({type(owner).__name__}) cannot be seen to call {unseen[0]}, so "
            "nobody knows what it does with this rank's part of its output: name it as "
            "'colwise_gather_output'"
        )
    return follower.gives_part or (giver is not None and giver not in follower.seen)


def _check_sizes(name: str, owner: nn.Module, styles: Mapping[str, Style], known: Collection[str]) -> None:
    modules = dict(owner.named_modules())
    whole: dict[int, str] = {}
    for layer, style in styles.items():
        if style.gives_parts and layer in modules and not isinstance(modules[layer], nn.Embedding):
            features = output_features(modules[layer])
            whole[features] = layer
            whole[features // style.packed] = layer
    for attribute in sorted(reads_of(type(owner)).attributes - _OTHER_NUMBERS - HEAD_COUNTS):
        value = vars(owner).get(attribute)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value in whole
            and attribute not in known
        ):
            raise SMPError(
                f"plan: the code of {name} ({type(owner).__name__}) uses self.{attribute}={value}, the "
                f"number of features of the whole {whole[value]}, which gives each rank a part. If it "
                "counts those "
                f'features, add "{name}.{attribute}": "local_size" to the plan, else leave '
                f"{name}.{whole[value]} "
                "out"
            )


class Follower(Expressions):
    """One pass over one forward."""

    def __init__(self, name: str, owner: nn.Module, styles: Mapping[str, Style]) -> None:
        super().__init__(name, owner, styles)
        self.returned: list[Marks] | None = None
        self.depth = 0
        self.gives_part = False

    def sequence(self, marks: Marks) -> Marks:
        """Of a Sequential."""
        for child in self.owner._modules:
            marks = self.call_module(child, marks)
        return marks

    def run(self, tree: ast.FunctionDef, *, summands: bool) -> None:
        """
        Args:
            summands: what the module returns is summed over the ranks, and its inputs' gradients are.
        """
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        if summands:
            self.returned = []
        elif len(arguments) > 1:
            self.values[arguments[1].arg] = frozenset({TRAINED})
        self.block(tree.body)

    def run_method(self, name: str, node: ast.Call, given: Marks | None = None) -> Marks | None:
        """A method of the module itself; None where there is no code to see.

        Args:
            given: marks of all its arguments, where the call is of a function that will call it.
        """
        method = getattr(type(self.owner), name, None)
        tree = function_of(method) if inspect.isfunction(method) else None
        if tree is None or self.depth > _MAX_DEPTH:
            return None
        arguments = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args)][1:]
        if given is None:
            values = dict(zip(arguments, [self.marks(each) for each in node.args], strict=False))
            values |= {keyword.arg: self.marks(keyword.value) for keyword in node.keywords if keyword.arg}
        else:
            values = dict.fromkeys(arguments, given)
        outside = self.values, self.numbers, self.scope, self.returned
        numbers = {} if given is not None else self.numbers_given(tree, node, skipped=1)
        self.values, self.numbers, self.scope, self.returned = values, numbers, scope_of(method), []
        self.depth += 1
        self.block(tree.body)
        found = union_of(self.returned)
        self.depth -= 1
        self.values, self.numbers, self.scope, self.returned = outside
        return found

    def numbers_given(self, tree: ast.FunctionDef, node: ast.Call, *, skipped: int = 0) -> dict[str, float]:
        """Those of the arguments of a call that are numbers, or defaults that are.

        Args:
            skipped: how many arguments are not written in the call.
        """
        places = [*tree.args.posonlyargs, *tree.args.args]
        defaults = dict(zip(reversed(places), reversed(tree.args.defaults), strict=False))
        defaults |= {
            name: value
            for name, value in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True)
            if value
        }
        given = {name.arg: value for name, value in defaults.items()}
        given |= dict(zip([name.arg for name in places[skipped:]], node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        rates = {name: self.rate(value) for name, value in given.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def call_outside(self, function: Callable[..., Any], node: ast.Call) -> None:
        """A function beside the class: looked through for what it draws alone."""
        tree = function_of(function)
        if tree is None or self.depth > _MAX_DEPTH:
            return
        names = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args)]
        values = dict(zip(names, [self.marks(each) for each in node.args], strict=False))
        values |= {keyword.arg: self.marks(keyword.value) for keyword in node.keywords if keyword.arg}
        inside = Follower(self.name, self.owner, {})
        inside.values = _for_draws(values)
        inside.numbers, inside.scope = self.numbers_given(tree, node), scope_of(function)
        inside.depth, inside.returned = self.depth + 1, []
        inside.block(tree.body)

    def call_within(self, name: str, module: nn.Module, node: ast.Call | None) -> None:
        """A module without parameters and split layers, likewise."""
        full = f"{self.name}.{name}" if self.name else name
        inside = Follower(full, module, {})
        inside.depth, inside.returned = self.depth + 1, []
        if isinstance(module, nn.Sequential):
            inside.sequence(frozenset({PART}))
        elif not type(module).__module__.startswith("torch.") and inside.depth <= _MAX_DEPTH:
            tree = function_of(type(module).forward)
            if tree is None or node is None:
                return
            names = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args)][1:]
            values = dict(zip(names, [self.marks(each) for each in node.args], strict=False))
            values |= {keyword.arg: self.marks(keyword.value) for keyword in node.keywords if keyword.arg}
            inside.values = _for_draws(values)
            inside.numbers = self.numbers_given(tree, node, skipped=1)
            inside.block(tree.body)

    def block(self, statements: Iterable[ast.stmt]) -> bool:
        """Whether it certainly ends the function."""
        return any(self.statement(statement) for statement in statements)

    def statement(self, node: ast.stmt) -> bool:
        """As :meth:`block`."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            marks = self.meet([self.marks(node.target), self.marks(node.value)], node)
            self.bind(node.target, marks)
        elif isinstance(node, ast.If):
            chosen = self.known(node.test)
            if chosen is not None:
                return self.block(node.body if chosen else node.orelse)
            self.check_test(node.test)
            before, numbers = dict(self.values), dict(self.numbers)
            ended = self.block(node.body)
            after, self.values = self.values, before
            in_body, self.numbers = self.numbers, numbers
            ended = self.block(node.orelse) and ended
            for name, marks in after.items():
                self.values[name] = self.values.get(name, NONE) | marks
            both = in_body.keys() & self.numbers.keys()
            self.numbers = {name: max(in_body[name], self.numbers[name]) for name in both}
            return ended
        elif isinstance(node, ast.For):
            self.bind(node.target, self.marks(node.iter))
            self.block(node.body)
            self.block(node.orelse)
        elif isinstance(node, ast.With):
            return self.block(node.body)
        elif isinstance(node, ast.While):
            self.block(node.body)
        elif isinstance(node, ast.Try):
            self.block([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.Return) and node.value is not None:
            several = isinstance(node.value, ast.Tuple) and node.value.elts
            first = node.value.elts[0] if several else node.value
            if self.depth and self.returned is not None:
                self.returned.append(self.marks(node.value))
            elif self.returned is not None:
                self.returned.append(self.marks(first))  # attention weights come second
            else:
                self.gives_part = self.gives_part or PART in self.marks(first)
        elif isinstance(node, ast.Expr):
            self.marks(node.value)
        return isinstance(node, ast.Return | ast.Raise)

    def known(self, test: ast.expr) -> bool | None:
        """What a condition on nothing but the module's own settings is; ``training`` may change."""
        if isinstance(test, ast.BoolOp):
            decides = isinstance(test.op, ast.Or)
            each = [self.known(value) for value in test.values]
            return decides if decides in each else None if None in each else not decides
        zeros = {name: 0.0 for name, number in self.numbers.items() if not number}
        for node in ast.walk(test):
            if isinstance(node, ast.Call):
                return None
            if isinstance(node, ast.Name) and node.id != "self" and node.id not in zeros:
                return None
            if isinstance(node, ast.Attribute) and node.attr == "training":
                return None
        try:
            names = {**zeros, "self": self.owner}
            return bool(eval(compile(ast.Expression(test), "<condition>", "eval"), {}, names))
        except Exception:
            return None

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple | ast.List)
            and len(target.elts) == len(value.elts)
        ):
            for one, other in zip(target.elts, [self.marks(each) for each in value.elts], strict=True):
                self.bind(one, other)
        elif not self.one_by_one(target, value):
            self.bind(target, self.marks(value))
            number = self.rate(value) if isinstance(target, ast.Name) else None
            if isinstance(target, ast.Name) and number is not None:
                self.numbers[target.id] = number

    def one_by_one(self, target: ast.expr, value: ast.expr) -> bool:
        """``q, k = rotate(q, k, ...)``: what gives back the names that it takes does not mix them."""
        if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Call):
            return False
        names = [ast.unparse(each) for each in target.elts]
        if [ast.unparse(each) for each in value.args[: len(names)]] != names:
            return False
        own = own_name(value.func) if isinstance(value.func, ast.Attribute) else None
        return own is None  # and the names keep their marks

    def bind(self, target: ast.expr, marks: Marks) -> None:
        if isinstance(target, ast.Name):
            self.values[target.id] = marks
            self.numbers.pop(target.id, None)
        elif isinstance(target, ast.Tuple | ast.List):
            for place, each in enumerate(target.elts):
                if marks & {SIZED, LAST} and PART not in marks:
                    last = place == len(target.elts) - 1
                    whole = not last if LAST in marks else place == 0
                    width = {WIDTH} if last and LAST in marks else set()
                    self.bind(each, NONE if whole else frozenset({SIZED, *width}))
                else:
                    self.bind(each, marks)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, marks)

    def call_inside(
        self,
        name: str,
        module: nn.Module,
        styles: Mapping[str, Style],
        given: Marks,
        node: ast.Call | None,
    ) -> Marks | None:
        """A module that has split layers itself; None where there is no code to see."""
        if PART not in given and not any(style.gives_parts for style in styles.values()):
            return frozenset({TRAINED})
        follower = Follower(f"{self.name}.{name}" if self.name else name, module, styles)
        if isinstance(module, nn.Sequential):
            return follower.sequence(given)
        tree = function_of(type(module).forward)
        if tree is None or node is None:
            return None
        arguments = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args)][1:]
        follower.values = dict(zip(arguments, [self.marks(each) for each in node.args], strict=False))
        named = {keyword.arg: self.marks(keyword.value) for keyword in node.keywords if keyword.arg}
        follower.values.update(named)
        follower.returned = []
        follower.block(tree.body)
        found = union_of(follower.returned)
        return found if PART in found else frozenset({TRAINED})


def _for_draws(values: Mapping[str, Marks]) -> dict[str, Marks]:
    """Marks under which code is looked through for what it draws, and for nothing else."""
    return {name: marks & {PART, SIZED, LAST} for name, marks in values.items()}
