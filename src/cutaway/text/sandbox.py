"""The environment in which chat templates run: what transformers gives them, and nothing that could hurt.

Jinja's sandbox keeps templates from Python's insides. It does not keep them from running forever or filling the memory,
so the parsed template is changed: loops and macros look at the clock, and whatever makes a value pays for it (`meter`).
"""

import operator
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cutaway.text.allowed import FILTERS, format_weight, method_weight, percent_weight, to_json
from cutaway.text.meter import BITS, METER, Meter, weight_of

MOST_NODES = 10_000
"""Parts of a parsed template. To compile this many takes about half a second."""


class Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; the text is written as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Guard(NodeTransformer):
    """Puts the meter into a parsed template."""

    def _call(self, name: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=at.lineno)

    def _begin(self, node: Any) -> None:
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [], node)).set_lineno(node.lineno))

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        self._begin(node)
        if node.test is not None:
            node.test = nodes.And(self._call("tick", [], node), node.test).set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        self._begin(node)
        return node

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._call("write", [_constant(child)], node) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("concatenate", node.nodes, node)

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._call("made", [node], node)

    visit_List = visit_Dict = _made  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        return self._made(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._made(node) if node.ctx == "load" else self.generic_visit(node)


def _constant(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        # Without the optimizer, since that computes constants while it compiles, before any meter runs.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, LoopControlExtension]
        )
        self.filters["tojson"] = to_json
        self.filters = {name: _metered(weight, self.filters[name]) for name, weight in FILTERS.items()}
        self.globals = {
            "range": _range,
            "dict": _dictionary,
            "namespace": _TemplateNamespace,
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        if sum(1 for _ in islice(template.find_all(nodes.Node), MOST_NODES)) == MOST_NODES:
            raise SecurityError(f"it has more than {MOST_NODES:,} parts")
        guarded: nodes.Template = Guard().visit(template)
        return guarded

    # What Guard calls

    def tick(self) -> bool:
        METER.get().tick()
        return True

    def made(self, value: Any) -> Any:
        return METER.get().made(value)

    def write(self, value: Any) -> str:
        return METER.get().write(value if type(value) is str else str(value))

    def concatenate(self, *values: Any) -> str:
        return METER.get().made("".join([self.write(value) for value in values]))

    # What Jinja's own code calls

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter, sizes = METER.get(), (weight_of(left), weight_of(right))
        if operator == "**":
            if not isinstance(left, int | float) or not isinstance(right, int | float) or abs(right) * sizes[0] > BITS:
                raise SecurityError("it raises a number to a power that is too large")
        elif operator == "%" and isinstance(left, str):
            meter.allow(percent_weight(left, right))
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            times, size = (left, sizes[1]) if isinstance(left, int) else (right, sizes[0])
            meter.allow(size * max(times, 1))
        else:
            meter.allow(sum(sizes))
        return meter.made(_OPERATORS[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        meter = METER.get()
        meter.tick()
        if isinstance(__obj, BuiltinMethodType) or (isinstance(__obj, MethodType) and isinstance(owner, str)):
            meter.allow(method_weight(owner, __obj.__name__, args, kwargs))
            result = super().call(__context, __obj, *args, **kwargs)
            # An object's methods hand out what it holds; a string's make new strings.
            return meter.made(result) if isinstance(owner, str) else result
        return super().call(__context, __obj, *args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which chat templates may not")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def metered(*args: Any, **kwargs: Any) -> str:
            METER.get().allow(format_weight(value.__self__, args, kwargs))
            return METER.get().made(inner(*args, **kwargs))

        return metered


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


def _metered(weight: Callable[..., int] | None, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that asks beforehand for what it could make, and whose lazy results are made at once."""
    passes = getattr(inner, "jinja_pass_arg", None)

    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        meter.tick()
        if weight is not None:
            meter.allow(weight(*args[0 if passes is None else 1 :], **kwargs))
        result = inner(*args, **kwargs)
        if isinstance(result, Iterator):
            result = list(_ticking(result, meter))
        return meter.made(result)

    if passes is not None:
        metered.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return metered


def _ticking(items: Iterator[Any], meter: Meter) -> Iterator[Any]:
    for item in items:
        meter.tick()
        yield item


def _range(*ends: int) -> range:
    numbers = range(*ends)
    if len(numbers) > 100_000:
        raise SecurityError("it counts beyond 100,000 in one range")
    return numbers


def _dictionary(*pairs: Any, **named: Any) -> dict[Any, Any]:
    made: dict[Any, Any] = METER.get().made(dict(*pairs, **named))
    return made


class _TemplateNamespace(Namespace):
    """Variables that outlive a loop. Names with an underscore could reach Python's insides."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *rest = args
        values: dict[str, Any] = dict(*rest, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # Jinja's shows the values, which for namespaces within namespaces need not end.
        return "<Namespace>"


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"it stores {name!r} in a namespace, where names may not begin with an underscore")


class RefusedError(TemplateError):
    """What a template says by raise_exception."""


def _raise(message: object) -> None:
    raise RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200:
        raise SecurityError("it formats the date by a pattern of more than 200 characters")
    return datetime.now().strftime(pattern)
