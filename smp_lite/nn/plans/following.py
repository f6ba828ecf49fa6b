"""Follows the outputs of split layers through the source code of the module that uses them.

What a column-parallel layer gives is this rank's part of the features. Elementwise code and reshaping by
heads are right on parts; some other code is not, and would give another result without an error. This reads
the forward of the module around the split layers, statement by statement, and refuses what it recognises:

- functions of all features (a mean, a softmax) on some of them;
- fused outputs that are cut where the whole ones would be (``chunk`` on a ``gate_up_proj``);
- whole parameters, and outputs of layers that are not split, that meet parts: their gradients would lack what
  other ranks contribute;
- dropout on parts, whose masks are not those of the whole model;
- sizes of the whole features, kept as attributes.

It is no proof: code that it cannot see is let pass. The proof is
:func:`~smp_lite.nn.plans.check_parallelized`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from ...errors import SMPError
from .heads import HEAD_COUNTS, output_features
from .source import function_of, reads_of, words
from .styles import Style

__all__ = ["check_code"]

_PART, _FLAT, _PACKED, _TRAINED, _ROW = "part", "flat", "packed", "trained", "row"
"""Marks of values: this rank's features; features still in the last dimension; parts
of several matrices there, which may be cut; whole, with a gradient; a bare
weight that is split by input features."""

_CUTS = words("chunk split tensor_split unbind narrow split_with_sizes")
_REDUCES = words(
    """
    mean std var sum softmax log_softmax norm max min amax amin argmax argmin topk sort argsort cumsum cumprod
    logsumexp prod median quantile normalize layer_norm rms_norm group_norm kthvalue std_mean var_mean
    vector_norm
    """
)
_RESHAPES = words("view reshape unflatten transpose permute swapaxes view_as movedim")
_ABOUT = words("shape dtype device size dim ndim numel is_cuda requires_grad type")
_HEAD_SIZES = words("head_dim head_size attention_head_size layer_idx")

_MAX_DEPTH = 4
"""Of methods that call methods."""

Marks = frozenset[str]
_NONE: Marks = frozenset()


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
    follower = _Follower(name, owner, styles)
    if isinstance(owner, nn.Sequential):
        return _PART in follower.sequence(frozenset({_TRAINED}))
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
        if style.gives_parts and layer in modules:
            features = output_features(modules[layer])
            whole[features] = layer
            whole[features // style.packed] = layer
    for attribute in sorted(reads_of(type(owner)).attributes - _HEAD_SIZES - HEAD_COUNTS):
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


class _Follower:
    """One pass over one forward."""

    def __init__(self, name: str, owner: nn.Module, styles: Mapping[str, Style]) -> None:
        self.name, self.owner, self.styles = name, owner, styles
        self.modules = dict(owner.named_modules())
        self.values: dict[str, Marks] = {}
        self.returned: list[Marks] | None = None
        self.depth = 0
        self.seen: set[str] = set()
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
            self.values[arguments[1].arg] = frozenset({_TRAINED})
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
        outside, returned = self.values, self.returned
        self.values, self.returned = values, []
        self.depth += 1
        self.block(tree.body)
        found = _union(self.returned)
        self.depth -= 1
        self.values, self.returned = outside, returned
        return found

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
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
            self.marks(node.test)
            before = dict(self.values)
            self.block(node.body)
            after, self.values = self.values, before
            self.block(node.orelse)
            for name, marks in after.items():
                self.values[name] = self.values.get(name, _NONE) | marks
        elif isinstance(node, ast.For):
            self.bind(node.target, self.marks(node.iter))
            self.block(node.body)
            self.block(node.orelse)
        elif isinstance(node, ast.While | ast.With):
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
                self.gives_part = self.gives_part or _PART in self.marks(first)
        elif isinstance(node, ast.Expr):
            self.marks(node.value)

    def known(self, test: ast.expr) -> bool | None:
        """What a condition on nothing but the module's own settings is; ``training`` may change."""
        for node in ast.walk(test):
            if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id != "self"):
                return None
            if isinstance(node, ast.Attribute) and node.attr == "training":
                return None
        try:
            return bool(eval(compile(ast.Expression(test), "<condition>", "eval"), {}, {"self": self.owner}))
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

    def one_by_one(self, target: ast.expr, value: ast.expr) -> bool:
        """``q, k = rotate(q, k, ...)``: what gives back the names that it takes does not mix them."""
        if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Call):
            return False
        names = [ast.unparse(each) for each in target.elts]
        if [ast.unparse(each) for each in value.args[: len(names)]] != names:
            return False
        own = _own_name(value.func) if isinstance(value.func, ast.Attribute) else None
        return own is None  # and the names keep their marks

    def bind(self, target: ast.expr, marks: Marks) -> None:
        if isinstance(target, ast.Name):
            self.values[target.id] = marks
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self.bind(each, marks)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, marks)

    # Expressions ------------------------------------------------------------------------------------------

    def marks(self, node: ast.expr | None) -> Marks:
        if node is None or isinstance(node, ast.Constant):
            return _NONE
        if isinstance(node, ast.Name):
            return self.values.get(node.id, _NONE)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Subscript):
            marks = self.marks(node.value)
            if _FLAT in marks and _cuts_last(node.slice):
                self.refuse_cut(ast.unparse(node))
            return marks
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return _union(self.marks(each) for each in node.elts)
        if isinstance(node, ast.IfExp):
            chosen = self.known(node.test)
            if chosen is not None:
                return self.marks(node.body if chosen else node.orelse)
            return self.marks(node.body) | self.marks(node.orelse)
        if isinstance(node, ast.GeneratorExp | ast.ListComp):
            for generator in node.generators:
                self.bind(generator.target, self.marks(generator.iter))
            return self.marks(node.elt)
        if isinstance(node, ast.BinOp):
            return self.meet([self.marks(node.left), self.marks(node.right)], node)
        if isinstance(node, ast.NamedExpr):
            marks = self.marks(node.value)
            self.bind(node.target, marks)
            return marks
        if isinstance(node, ast.Lambda | ast.JoinedStr | ast.Compare | ast.BoolOp):
            return _NONE
        children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return self.meet([self.marks(child) for child in children], node)

    def attribute(self, node: ast.Attribute) -> Marks:
        own = _own_name(node)
        if own is not None:
            holder, _, last = own.rpartition(".")
            module = self.modules.get(holder)
            parameter = None if module is None else module._parameters.get(last)
            style = self.styles.get(own)
            if parameter is None:
                return _NONE
            if style is None or style.kind not in ("column", "row"):
                return frozenset({_TRAINED}) if style is None else _NONE
            if parameter.dim() == 1:
                return frozenset({_PART})
            if style.kind == "row":
                return frozenset({_ROW})
            return _given(style)
        marks = self.marks(node.value)
        return _NONE if node.attr in _ABOUT else marks

    def call(self, node: ast.Call) -> Marks:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            own = _own_name(node.func)
            if own is not None and own not in self.modules and hasattr(type(self.owner), own):
                found = self.run_method(own, node)
                if found is not None:
                    return found
            if own is not None and own in self.modules:
                return self.call_module(own, _union(self.marks(each) for each in arguments), node)
            if own is None:
                base = self.marks(node.func.value)
                method = node.func.attr
                if method in _ABOUT:
                    return _NONE
                if method in _RESHAPES:
                    return base - {_FLAT, _PACKED}
                module_function = isinstance(node.func.value, ast.Name | ast.Attribute) and not base
                cut = self.marks(node.args[0]) if module_function and node.args else base
                if method in _CUTS and _FLAT in cut:
                    self.refuse_cut(ast.unparse(node))
                if method in _REDUCES and cut & {_FLAT, _PACKED}:
                    self.refuse(
                        f"takes {method} of this rank's part of the features, in "
                        f"{ast.unparse(node)[:120]!r}, where it took that of all: name the layers before "
                        "it as 'colwise_gather_output', and the layer after it as 'rowwise_split_input'"
                    )
                return self.meet([base, *(self.marks(each) for each in arguments)], node)
        else:
            self.marks(node.func)
        marks = self.meet([self.marks(each) for each in arguments], node)
        for each in arguments:
            handed = _own_name(each)
            if handed is not None and handed not in self.modules:
                found = self.run_method(handed, node, marks)
                marks = marks if found is None else found
        if _PART in marks:
            for each in arguments:
                self.check_rate(each)
        return marks

    def call_module(self, name: str, given: Marks, node: ast.Call | None = None) -> Marks:
        style, module = self.styles.get(name), self.modules[name]
        self.seen.add(name)
        if style is not None and style.kind == "tail":
            return _NONE  # its gradients are seen to
        if style is not None and style.kind in ("column", "row", "summands", "summed"):
            return _given(style) if style.gives_parts else frozenset({_TRAINED})
        inside = {
            other[len(name) + 1 :]: s for other, s in self.styles.items() if other.startswith(f"{name}.")
        }
        if style is None and inside:
            found = self.call_inside(name, module, inside, given, node)
            if found is not None:
                return found
        trained = any(True for _ in module.parameters())  # frozen ones too: they may be thawed
        if _PART not in given:
            return frozenset({_TRAINED}) if trained else given
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
        if isinstance(module, nn.Dropout) and module.p:
            self.refuse(
                f"applies dropout ({name}, p={module.p}) to this rank's part of the features: the masks "
                "would not be those of the whole model. Set it to 0, or, between a colwise and a rowwise "
                "layer, add "
                f'"{self.name}.{name}": "local_dropout" to the plan'
            )
        return given

    def call_inside(
        self,
        name: str,
        module: nn.Module,
        styles: Mapping[str, Style],
        given: Marks,
        node: ast.Call | None,
    ) -> Marks | None:
        """A module that has split layers itself; None where there is no code to see."""
        if _PART not in given and not any(style.gives_parts for style in styles.values()):
            return frozenset({_TRAINED})
        follower = _Follower(f"{self.name}.{name}" if self.name else name, module, styles)
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
        found = _union(follower.returned)
        return found if _PART in found else frozenset({_TRAINED})

    def check_rate(self, node: ast.expr) -> None:
        for each in ast.walk(node):
            own = _own_name(each) if isinstance(each, ast.Attribute) else None
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
        union = _union(marks)
        if _ROW in union:
            return _NONE
        if _PART in union and any(_TRAINED in each and _PART not in each for each in marks):
            self.refuse(
                f"lets this rank's part of the features meet whole values, in {ast.unparse(node)[:120]!r}: "
                "the gradients of those would lack the other ranks' contributions. Split the layers that "
                "they come from alike, or name all of them as 'colwise_gather_output'"
            )
        return union - {_TRAINED} if _PART in union else union

    def refuse_cut(self, code: str) -> None:
        self.refuse(
            f"cuts what a colwise layer gives, in {code[:120]!r}, where the whole features would be cut: use "
            "'packed_colwise' (packed_colwise:3 for three equal matrices), or 'colwise_gather_output' and "
            "'rowwise_split_input' for the layer after it"
        )

    def refuse(self, what: str) -> None:
        raise SMPError(f"plan: the code of {self.name} ({type(self.owner).__name__}) {what}")


def _own_name(node: ast.AST) -> str | None:
    """``a.b`` of ``self.a.b``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" and names else None


def _cuts_last(index: ast.expr) -> bool:
    """Whether an index takes a range of the last dimension, as far as one can see: ``[..., a:b]``."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    last = parts[-1]
    whole = isinstance(last, ast.Slice) and last.lower is None and last.upper is None
    started = len(parts) > 1 and isinstance(parts[0], ast.Constant) and parts[0].value is Ellipsis
    return started and isinstance(last, ast.Slice) and not whole


def _given(style: Style) -> Marks:
    return frozenset({_PART, _FLAT if style.packed == 1 else _PACKED})


def _union(given: Iterable[Marks]) -> Marks:
    return frozenset().union(*given)
