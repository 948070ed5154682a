"""Jinja sandbox for chat templates, with the filters and globals of transformers and resource limits.

The Jinja sandbox blocks access to Python internals, but does not limit time and memory. Therefore the parsed template
is transformed: loops and macros check the deadline, and every expression that creates a value is metered (see
`resource_limits`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from itertools import islice
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cutaway.tokenizer.chat.allowlist import (
    ALLOWED_FILTERS,
    SizeEstimate,
    method_result_size,
    percent_format_size,
    str_format_size,
    to_json,
)
from cutaway.tokenizer.chat.resource_limits import CURRENT_METER, MAX_INT_BITS, ResourceMeter, estimate_size

T = TypeVar("T")
_MAX_TEMPLATE_NODES = 10_000
"""Maximum number of AST nodes. Compiling this many takes about half a second."""


GENERATION_MARKERS: ContextVar[tuple[str, str] | None] = ContextVar("cutaway_generation_markers", default=None)
"""Texts that are rendered before and after the contents of each generation block. None: no markers."""
TEMPLATE_TIME: ContextVar[datetime | None] = ContextVar("cutaway_template_time", default=None)
"""Time that `strftime_now` formats. None: the current time."""


class _GenerationTag(Extension):
    """Jinja tag `{% generation %}`, which marks text that the assistant generates.

    The text is rendered unchanged. If GENERATION_MARKERS is set, it is enclosed in the markers.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        markers = [
            nodes.Output([nodes.Call(nodes.EnvironmentAttribute(name), [], [], None, None)]).set_lineno(line)
            for name in ("generation_start", "generation_end")
        ]
        return nodes.Scope([markers[0], *body, markers[1]]).set_lineno(line)


class _MeteringTransformer(NodeTransformer):
    """Insert calls of the resource meter into the AST of a template."""

    def _environment_call(self, name: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=node.lineno)

    def _insert_time_check(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> None:
        node.body.insert(0, nodes.ExprStmt(self._environment_call("check_time", [], node)).set_lineno(node.lineno))

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        self._insert_time_check(node)
        if node.test is not None:
            node.test = nodes.And(self._environment_call("check_time", [], node), node.test).set_lineno(node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        self._insert_time_check(node)
        return node

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._environment_call("charge_output", [_to_const(child)], node) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._environment_call("concatenate", node.nodes, node)

    def _charge_result(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._environment_call("charge_value", [node], node)

    visit_List = visit_Dict = _charge_result  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        return self._charge_result(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._charge_result(node) if node.ctx == "load" else self.generic_visit(node)


def _to_const(node: nodes.Expr) -> nodes.Expr:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


class ChatTemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja environment with metered operators, filters, methods and globals."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        # optimized=False: the optimizer would evaluate constant expressions at compile time, without a meter.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_GenerationTag, LoopControlExtension]
        )
        self.filters["tojson"] = to_json
        self.filters = {name: _meter_filter(estimate, self.filters[name]) for name, estimate in ALLOWED_FILTERS.items()}
        self.globals = {
            "range": _bounded_range,
            "dict": _metered_dict,
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        if sum(1 for _ in islice(template.find_all(nodes.Node), _MAX_TEMPLATE_NODES)) == _MAX_TEMPLATE_NODES:
            raise SecurityError(f"it has more than {_MAX_TEMPLATE_NODES:,} nodes")
        metered: nodes.Template = _MeteringTransformer().visit(template)
        return metered

    # Called by code that _MeteringTransformer inserts

    def check_time(self) -> bool:
        CURRENT_METER.get().check_time()
        return True

    def charge_value(self, value: T) -> T:
        return CURRENT_METER.get().charge_value(value)

    def charge_output(self, value: object) -> str:
        return CURRENT_METER.get().charge_output(value if type(value) is str else str(value))

    def concatenate(self, *values: object) -> str:
        return CURRENT_METER.get().charge_value("".join([self.charge_output(value) for value in values]))

    # Called by code that _GenerationTag inserts

    def generation_start(self) -> str:
        markers = GENERATION_MARKERS.get()
        return "" if markers is None else markers[0]

    def generation_end(self) -> str:
        markers = GENERATION_MARKERS.get()
        return "" if markers is None else markers[1]

    # Called by Jinja

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter, sizes = CURRENT_METER.get(), (estimate_size(left), estimate_size(right))
        if operator == "**":
            are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if not are_numbers or abs(right) * sizes[0] > MAX_INT_BITS:
                raise SecurityError("it computes a power that is too large")
        elif operator == "%" and isinstance(left, str):
            meter.check_size(percent_format_size(left, right))
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            times, size = (left, sizes[1]) if isinstance(left, int) else (right, sizes[0])
            meter.check_size(size * max(times, 1))
        else:
            meter.check_size(sum(sizes))
        return meter.charge_value(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        meter = CURRENT_METER.get()
        meter.check_time()
        if isinstance(__obj, BuiltinMethodType) or (isinstance(__obj, MethodType) and isinstance(owner, str)):
            meter.check_size(method_result_size(owner, __obj.__name__, args, kwargs))
            result = super().call(__context, __obj, *args, **kwargs)
            # Methods of str create new strings; methods of containers return existing values.
            return meter.charge_value(result) if isinstance(owner, str) else result
        return super().call(__context, __obj, *args, **kwargs)

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        raise SecurityError(f"it accesses {attribute!r} of a {type(obj).__name__}, which is not allowed")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def metered(*args: object, **kwargs: object) -> str:
            CURRENT_METER.get().check_size(str_format_size(value.__self__, args, kwargs))
            return CURRENT_METER.get().charge_value(inner(*args, **kwargs))

        return metered


def _meter_filter(estimate: SizeEstimate | None, filter_function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a filter: check its size estimate before the call, and turn a lazy result into a list."""
    pass_arg = getattr(filter_function, "jinja_pass_arg", None)

    def metered(*args: object, **kwargs: object) -> object:
        meter = CURRENT_METER.get()
        meter.check_time()
        if estimate is not None:
            meter.check_size(estimate(*args[0 if pass_arg is None else 1 :], **kwargs))
        result = filter_function(*args, **kwargs)
        if isinstance(result, Iterator):
            result = list(_check_time_per_item(result, meter))
        return meter.charge_value(result)

    if pass_arg is not None:
        metered.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
    return metered


def _check_time_per_item(items: Iterator[object], meter: ResourceMeter) -> Iterator[object]:
    for item in items:
        meter.check_time()
        yield item


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > 100_000:
        raise SecurityError("it uses a range of more than 100,000 numbers")
    return numbers


def _metered_dict(*pairs: Iterable[tuple[str, object]], **named: object) -> dict[str, object]:
    return CURRENT_METER.get().charge_value(dict(*pairs, **named))


class _TemplateNamespace(Namespace):
    """`namespace()` of templates: variables that persist after a loop. Names with a leading underscore are rejected."""

    def __init__(self, /, *pairs: Iterable[tuple[str, object]], **named: object) -> None:
        values: dict[str, object] = dict(*pairs, **named)
        for name in values:
            _check_namespace_key(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_namespace_key(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        # The repr of Jinja includes the values and does not terminate for recursive namespaces.
        return "<Namespace>"


def _check_namespace_key(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"it sets {name!r} in a namespace, where names must not start with an underscore")


class TemplateRaisedError(TemplateError):
    """Raised if a template calls `raise_exception`, e.g. for messages that it does not support."""


def _raise_exception(message: object) -> None:
    raise TemplateRaisedError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200:
        raise SecurityError("it uses a date format of more than 200 characters")
    return (TEMPLATE_TIME.get() or datetime.now()).strftime(pattern)
