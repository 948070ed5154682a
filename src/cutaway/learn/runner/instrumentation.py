"""Instrument a learner's functions: every expression is a step, whose value can be recorded or changed at run time.

The functions are compiled again from their syntax trees. In the instrumented code each name, constant, operation and
call in a function body is replaced by a call of a method of `StepRecorder`, which evaluates it. An `Edit` changes one
step.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

RECORDER_NAME, _START_NAME = "_cutaway_steps", "_cutaway_start"
_MAX_TEXT = 60
_MAX_EXPONENT = 64
"""Largest exponent that a changed function may compute: larger powers of integers take seconds."""
BINARY_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "@": operator.matmul,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip

_UNCHANGED_NODES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Match, ast.JoinedStr, ast.Delete, ast.Global,
    ast.Nonlocal, ast.Import, ast.ImportFrom,
)  # fmt: skip
"""Statements and expressions inside a function that are not instrumented."""
_AXIS_METHODS = frozenset({
    "amax", "amin", "argmax", "cat", "chunk", "concat", "cumsum", "flip", "gather", "log_softmax", "logsumexp", "max",
    "mean", "median", "min", "norm", "permute", "prod", "repeat_interleave", "select", "softmax", "split", "squeeze",
    "stack", "std", "sum", "swapaxes", "transpose", "unbind", "unsqueeze", "var",
})  # fmt: skip
"""Functions whose constant arguments are axes."""
StepKind = Literal["name", "constant", "operator", "comparison", "method", "conditional", "value"]


@dataclass(frozen=True)
class Step:
    """One expression of the source: its place, its text, and the steps that it is computed from."""

    index: int
    kind: StepKind
    detail: str
    """Name of the variable or method, symbol of the operator, or text of the constant.

    For a conditional, the part that may lack parentheses: `b if test else c` of `a + b if test else c`."""
    function: str
    """Name of the function that contains the step."""
    filename: str
    line: int
    text: str
    children: tuple[int, ...] = ()
    is_axis: bool = False
    """Whether the step is a constant that is the axis of a call."""

    parent_text: str = ""
    """Text of the expression that contains the step."""

    @property
    def location(self) -> str:
        inside = f" in `{self.parent_text}`" if self.parent_text and self.kind in ("name", "constant") else ""
        return f"line {self.line} of {self.filename}: `{self.text}`{inside}"


@dataclass(frozen=True)
class Edit:
    """A change of one step. Each field that is not None replaces a part of its evaluation."""

    index: int
    description: str
    """What is changed, as a phrase such as `with a division in place of the multiplication`."""
    rank: int = 2
    """Rank of the kind of change: changes of a lower rank are more likely and are tried first."""
    symbol: str | None = None
    """Another operator."""
    swap_operands: bool = False
    swap_arguments: tuple[int, int] | None = None
    """Positions of two arguments of a call that are exchanged."""
    exchange: tuple[str, str] | None = None
    """Names of two arguments of the function that are exchanged in these steps and in `exchanged_steps`."""
    exchanged_steps: frozenset[int] = frozenset()
    method: str | None = None
    """Another method or function."""
    keywords: Mapping[str, Any] | None = None
    """Keyword arguments that are added to a call."""
    reverse_parts: bool = False
    """Whether the list that is the first argument of a call, as of `torch.cat`, is reversed."""
    add_parentheses: bool = False
    """Whether the conditional of `a + b if test else c` or `a if test else b * c` is evaluated first."""
    change: "Callable[[Any, StepRecorder], Any] | None" = None
    """Function of the value of the step and the recorder that returns another value."""
    others: "tuple[Edit, ...]" = ()
    """Changes of other steps that are made together with this one."""


class StepLimitError(BaseException):
    """The instrumented code has taken more steps than allowed. It is a BaseException, as TimeLimitError."""


@dataclass
class StepRecorder:
    """Evaluates the steps of instrumented code, applies an edit, and records values."""

    max_steps: int = 20_000
    edits: dict[int, Edit] = field(default_factory=dict)
    """The edits in effect, by index of the step."""
    exchange_edit: Edit | None = None
    """The edit in effect, if it exchanges two arguments."""
    case_index: int = 0
    """Index of the test case that is running."""
    num_steps: int = 0
    values: dict[int, Any] = field(default_factory=dict)
    """Last value of each step, by index, in the order of the first evaluation."""
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of the last call of each function, by name."""
    variables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of the arguments and variables that were read or assigned, by function."""
    sources: dict[tuple[str, str], int] = field(default_factory=dict)
    """(function, variable) → index of the step that was assigned last."""
    name_sources: dict[int, int] = field(default_factory=dict)
    """Index of a name → index of the step that had been assigned to the variable when it was read."""
    unchanged_values: dict[int, dict[int, Any]] = field(default_factory=dict)
    """Case → values of the steps without an edit, from a run of `InstrumentedFunction.record_unchanged`."""

    def start(self, case_index: int, edit: Edit | None = None) -> None:
        """Forget all values, and run with this edit from now on."""
        self.case_index, self.num_steps = case_index, 0
        self.edits = {} if edit is None else {part.index: part for part in (edit, *edit.others)}
        self.exchange_edit = edit if edit is not None and edit.exchange is not None else None
        for table in (self.values, self.arguments, self.variables, self.sources, self.name_sources):
            table.clear()

    def enter(self, function: str, arguments: dict[str, Any]) -> None:
        self.arguments[function], self.variables[function] = {**arguments}, {**arguments}

    def name(self, index: int, function: str, name: str, value: Any) -> Any:
        if self.exchange_edit is not None and index in self.exchange_edit.exchanged_steps:
            one, other = self.exchange_edit.exchange or ("", "")
            value = self.arguments[function][other if name == one else one]
        self.variables.setdefault(function, {})[name] = value
        if (function, name) in self.sources:
            self.name_sources[index] = self.sources[function, name]
        return self.value(index, value)

    def bind(self, function: str, name: str, index: int, value: Any) -> Any:
        """Record an assignment of the value of a step to a variable."""
        self.sources[function, name] = index
        self.variables.setdefault(function, {})[name] = value
        return value

    def value(self, index: int, value: Any) -> Any:
        self.num_steps += 1
        if self.num_steps > self.max_steps:
            raise StepLimitError
        edit = self.edits.get(index)
        if edit is not None and edit.change is not None:
            value = edit.change(value, self)
        self.values[index] = value
        return value

    def operate(self, index: int, symbol: str, left: Any, right: Any) -> Any:
        """Evaluate an operator or a comparison."""
        edit = self.edits.get(index)
        if edit is not None:
            symbol = edit.symbol or symbol
            left, right = (right, left) if edit.swap_operands else (left, right)
        if self.edits and symbol == "**" and isinstance(right, int) and right > _MAX_EXPONENT:
            raise OverflowError("a change has led to a power of a huge number")
        function = BINARY_OPERATORS.get(symbol) or COMPARISONS[symbol]
        return self.value(index, function(left, right))

    def call(self, index: int, owner: Any, method: str, *args: Any, **keywords: Any) -> Any:
        """Call a method of an object, or a function of a module."""
        edit = self.edits.get(index)
        if edit is not None:
            method, keywords = edit.method or method, keywords | dict(edit.keywords or {})
            if edit.swap_arguments is not None:
                one, other = edit.swap_arguments
                if max(one, other) >= len(args):
                    raise IndexError("the other arguments are keywords")
                args = tuple(args[{one: other, other: one}.get(n, n)] for n in range(len(args)))
            if edit.reverse_parts:
                args = (list(reversed(args[0])), *args[1:])
        return self.value(index, getattr(owner, method)(*args, **keywords))

    def choose(
        self,
        index: int,
        operation: int,
        symbol: str,
        test: Any,
        left: Callable[[], Any],
        right: Callable[[], Any],
        otherwise: Callable[[], Any],
    ) -> Any:
        """Evaluate `left symbol right if test else otherwise`. `operation` is the index of the operator."""
        edit = self.edits.get(index)
        if edit is not None and edit.add_parentheses:
            value = self.operate(operation, symbol, left(), right() if test else otherwise())
        else:
            value = self.operate(operation, symbol, left(), right()) if test else otherwise()
        return self.value(index, value)

    def choose_start(
        self, index: int, test: Any, body: Callable[[], Any], start: Callable[[], Any], rest: Callable[[Any], Any]
    ) -> Any:
        """Evaluate `body if test else rest(start)`; with parentheses, `rest(body if test else start)`."""
        edit = self.edits.get(index)
        if edit is not None and edit.add_parentheses:
            return self.value(index, rest(body() if test else start()))
        return self.value(index, body() if test else rest(start()))


class _Instrumenter(ast.NodeTransformer):
    """Replaces the expressions in the body of one function."""

    def __init__(self, steps: list[Step], source: str, filename: str, function: str) -> None:
        self.steps, self.filename, self.function = steps, filename, function
        self.lines = source.encode().split(b"\n")
        self.children: list[int] = []
        self.parameters: set[str] = set()

    # ------------------------------------------------------------------------------------ statements

    def instrument(self, function: ast.FunctionDef) -> ast.FunctionDef:
        """Instrument the body of a function; defaults, annotations and decorators are not changed."""
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            argument.annotation = None  # annotations may need names that the namespace lacks
            self.parameters.add(argument.arg)
        function.returns = None
        enter = self._recorder_call("enter", ast.Constant(self.function), _call(ast.Name("locals", ast.Load()), []))
        has_docstring = ast.get_docstring(function, clean=False) is not None
        docstring, body = (function.body[:1], function.body[1:]) if has_docstring else ([], function.body)
        function.body = [*docstring, ast.Expr(enter), *(self.visit(statement) for statement in body)]
        return function

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, _UNCHANGED_NODES) else super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target, value = node.targets[0] if len(node.targets) == 1 else None, node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = zip(target.elts, value.elts, strict=True)
            node.value = ast.Tuple([self._visit_assigned(part, element) for part, element in pairs], ast.Load())
        else:
            node.value = self._visit_assigned(target, value)
        return node

    def _visit_assigned(self, target: ast.expr | None, value: ast.expr) -> ast.expr:
        """Instrument an assigned expression, and record the assignment if its target is a variable."""
        before = len(self.steps)
        value = self._visit_root(value)
        if not isinstance(target, ast.Name) or len(self.steps) == before:
            return value
        index = ast.Constant(self.steps[-1].index)
        return self._recorder_call("bind", ast.Constant(self.function), ast.Constant(target.id), index, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = None if node.value is None else self._visit_root(node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        node.value = self._visit_root(node.value)
        return node

    def _visit_root(self, node: ast.expr) -> ast.expr:
        self.children = []
        return self.visit(node)

    # ------------------------------------------------------------------------------------ expressions

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not isinstance(node.ctx, ast.Load) or node.id == _START_NAME:
            return node
        index = self._add(node, "name", node.id)
        return self._recorder_call(
            "name", ast.Constant(index), ast.Constant(self.function), ast.Constant(node.id), node
        )

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return self._constant(node) if isinstance(node.value, int | float) else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        operand = node.operand
        if isinstance(operand, ast.Constant) and isinstance(operand.value, int | float):
            return self._constant(node)
        return self._generic(node)

    def _constant(self, node: ast.expr) -> ast.AST:
        index = self._add(node, "constant", ast.unparse(node))
        return self._recorder_call("value", ast.Constant(index), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        symbol = _SYMBOLS.get(type(node.op))
        return (
            self._generic(node) if symbol is None else self._operator(node, "operator", symbol, node.left, node.right)
        )

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        symbol = _SYMBOLS.get(type(node.ops[0]))
        if len(node.ops) > 1 or symbol is None:
            return self._generic(node)
        return self._operator(node, "comparison", symbol, node.left, node.comparators[0])

    def _operator(self, node: ast.expr, kind: StepKind, symbol: str, left: ast.expr, right: ast.expr) -> ast.AST:
        text = self._text(node)
        (left, right), children = self._visit_children([left, right])
        index = self._add(node, kind, symbol, children, text)
        return self._recorder_call("operate", ast.Constant(index), ast.Constant(symbol), left, right)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = self._text(node)
        is_plain = not any(isinstance(arg, ast.Starred) for arg in node.args) and all(k.arg for k in node.keywords)
        if not is_plain:
            return self._generic(node)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(node.func, ast.Name) and node.func.id in self.parameters:  # a function that is an argument
            (node.func,), _ = self._visit_children([node.func])
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        visited, children = self._visit_children([*([] if owner is None else [owner]), *arguments])
        if isinstance(node.func, ast.Attribute) and node.func.attr in _AXIS_METHODS:
            self._mark_axes(children)
        values = visited[1:] if owner is not None else visited
        args = values[: len(node.args)]
        keywords = [ast.keyword(k.arg, v) for k, v in zip(node.keywords, values[len(args) :], strict=True)]
        if isinstance(node.func, ast.Attribute):
            index = self._add(node, "method", node.func.attr, children, text)
            call = self._recorder_call("call", ast.Constant(index), visited[0], ast.Constant(node.func.attr), *args)
            call.keywords = keywords
            return call
        index = self._add(node, "value", "call", children, text)
        return self._recorder_call("value", ast.Constant(index), _call(node.func, args, keywords))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._generic(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self._generic(node) if isinstance(node.ctx, ast.Load) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        body = node.body
        symbol = _SYMBOLS.get(type(body.op)) if isinstance(body, ast.BinOp) else None
        if not isinstance(body, ast.BinOp) or symbol is None:
            return self._conditional_start(node) if isinstance(node.orelse, ast.BinOp) else self._generic(node)
        text, body_text = self._text(node), self._text(body)
        detail = f"{self._text(body.right)} if {self._text(node.test)} else {self._text(node.orelse)}"
        outer, self.children = self.children, []
        test, otherwise = self.visit(node.test), self.visit(node.orelse)
        (left, right), operands = self._visit_children([body.left, body.right])
        operation = self._add(body, "operator", symbol, operands, body_text)
        children, self.children = tuple(self.children), outer
        index = self._add(node, "conditional", detail, children, text)
        constants = (ast.Constant(index), ast.Constant(operation), ast.Constant(symbol))
        return self._recorder_call("choose", *constants, test, _lambda(left), _lambda(right), _lambda(otherwise))

    def _conditional_start(self, node: ast.IfExp) -> ast.AST:
        """Instrument `a if test else b * c`, which may be meant as `(a if test else b) * c`."""
        text, parent, first = self._text(node), node, node.orelse
        while isinstance(first, ast.BinOp):
            parent, first = first, first.left  # type: ignore[assignment]
        detail = f"{self._text(node.body)} if {self._text(node.test)} else {self._text(first)}"
        outer, self.children = self.children, []
        test, body, start = self.visit(node.test), self.visit(node.body), self.visit(first)
        parent.left = ast.copy_location(ast.Name(_START_NAME, ast.Load()), first)  # type: ignore[attr-defined]
        rest = self.visit(node.orelse)
        children, self.children = tuple(self.children), outer
        index = self._add(node, "conditional", detail, children, text)
        functions = (_lambda(body), _lambda(start), _lambda(rest, _START_NAME))
        return self._recorder_call("choose_start", ast.Constant(index), test, *functions)

    def _generic(self, node: ast.expr) -> ast.AST:
        """Instrument the parts of an expression, and record its value."""
        text, outer, self.children = self._text(node), self.children, []
        kind = type(node).__name__
        node = self.generic_visit(node)  # type: ignore[assignment]
        children, self.children = tuple(self.children), outer
        index = self._add(node, "value", kind, children, text)
        return self._recorder_call("value", ast.Constant(index), node)

    def _visit_children(self, nodes: Sequence[ast.expr]) -> tuple[list[ast.expr], tuple[int, ...]]:
        outer, self.children = self.children, []
        visited = [self.visit(node) for node in nodes]
        children, self.children = tuple(self.children), outer
        return visited, children

    # ------------------------------------------------------------------------------------ steps

    def _add(
        self, node: ast.expr, kind: StepKind, detail: str, children: tuple[int, ...] = (), text: str | None = None
    ) -> int:
        index = len(self.steps)
        text = self._text(node) if text is None else text
        self.steps.append(Step(index, kind, detail, self.function, self.filename, node.lineno, text, children))
        for child in children:
            self.steps[child] = replace(self.steps[child], parent_text=text)
        self.children.append(index)
        return index

    def _mark_axes(self, children: Sequence[int]) -> None:
        for index in children:
            if self.steps[index].kind == "constant":
                self.steps[index] = replace(self.steps[index], is_axis=True)

    def _text(self, node: ast.expr) -> str:
        text = " ".join(self._source_segment(node).split())
        return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"

    def _source_segment(self, node: ast.expr) -> str:
        """Return the text of a node. Unlike `ast.get_source_segment`, this does not split the source again."""
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()

    @staticmethod
    def _recorder_call(method: str, *args: ast.expr) -> ast.Call:
        return _call(ast.Attribute(ast.Name(RECORDER_NAME, ast.Load()), method, ast.Load()), list(args))


def _lambda(body: ast.expr, *names: str) -> ast.Lambda:
    args = [ast.arg(name) for name in names]
    return ast.Lambda(ast.arguments(posonlyargs=[], args=args, kwonlyargs=[], kw_defaults=[], defaults=[]), body)


def _call(function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(function, args, keywords or [])


def instrument_functions(
    sources: Mapping[str, str], namespace: Mapping[str, Any], recorder: StepRecorder
) -> tuple[dict[str, Any], list[Step]]:
    """Compile all functions at the top level of the sources again, with steps, into a copy of the namespace.

    Return the copy and the steps. `sources` are texts by file name.
    """
    copied, steps = {**namespace, RECORDER_NAME: recorder}, list[Step]()
    for filename, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                num_steps = len(steps)
                function = _Instrumenter(steps, source, filename, node.name).instrument(node)
                module = ast.fix_missing_locations(ast.Module([function], []))
                try:
                    exec(compile(module, filename, "exec"), copied)
                except Exception:  # a default value that cannot be computed again: the function has no steps
                    del steps[num_steps:]
    return copied, steps
