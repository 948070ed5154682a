"""Detects regular expressions for which matching can take very long, such as (x+x+)+y on x…x.

A backtracking engine tries every way in which an expression can match the same text. Their number grows exponentially
with the length of the text if and only if, in the position automaton of the expression (Glushkov 1961), two different
paths lead from a state back to itself with the same text (Weber and Seidl 1991, "On the degree of ambiguity of finite
automata": criterion EDA). If the expression may end in that state, the first way already succeeds, so it is harmless.
Several loops in sequence over one character, as in x*x*x*x*y, have a polynomial number of ways, which is slow as well.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import Regex, normalizers

MAX_EDGES = 200_000
"""An expression with more transitions, or pairs of states, is rejected without analyzing it further."""
MAX_LOOPS = 3
"""Maximum number of successive loops over the same character before something else is required."""
_MAX_COPIES = 4
"""Larger numbers of repetitions are treated as this one, or as any number."""
_SAMPLES = "".join(map(chr, [9, 10, 13, *range(32, 127)])) + (
    "\u00a0\u2003\u200b\u3000\u0300\u093e\u20e3éÀǅʰªßاकก一龥あアー가①²½٣Ⅳ–„«»§©€∑×＿、。！…😀\ue000"
)
"""Characters of all kinds that the classes of split patterns distinguish."""


class _Node(NamedTuple):
    """A part of an expression: `kind` is one of char, assertion, cat, alt, repeat."""

    kind: str
    children: Sequence["_Node"] = ()
    text: str = ""
    """Of char: the source of an expression for one character."""
    low: int = 0
    high: int | None = None


class _Fragment(NamedTuple):
    """Of a part: whether it matches the empty text, and the states in which it can begin and end."""

    nullable: bool
    first: tuple[int, ...]
    last: tuple[int, ...]


_EMPTY = _Fragment(True, (), ())


class _TooComplexError(Exception):
    pass


class _Parser:
    """Parses the syntax of Oniguruma as far as it matters for ambiguity. It never rejects an expression."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.position = pattern, 0
        self.lookarounds: list[_Node] = []

    def peek(self, length: int = 1) -> str:
        return self.pattern[self.position : self.position + length]

    def take(self, length: int = 1) -> str:
        text = self.peek(length)
        self.position += length
        return text

    def take_until(self, end: str) -> str:
        """Take the text up to and including `end`."""
        stop = self.pattern.find(end, self.position)
        return self.take((len(self.pattern) if stop < 0 else stop + len(end)) - self.position)

    def parse_alternatives(self, flags: frozenset[str], depth: int = 0) -> _Node:
        """Parse up to the end of a group."""
        if depth > 100:
            raise _TooComplexError
        alternatives: list[list[_Node]] = [[]]
        while self.position < len(self.pattern) and self.peek() != ")":
            if self.peek() == "|":
                self.take()
                alternatives.append([])
            elif "x" in flags and self.peek().isspace():
                self.take()
            elif "x" in flags and self.peek() == "#":
                self.take_until("\n")
            elif self.peek(2) == "(?" and (switched := self._take_flag_switch(flags)) is not None:
                alternatives[-1].append(self.parse_alternatives(switched, depth + 1))  # (?i) applies up to the end
            else:
                alternatives[-1].append(self._parse_quantifiers(self._parse_atom(flags, depth), flags))
        return _Node("alt", [_Node("cat", children) for children in alternatives])

    def _take_flag_switch(self, flags: frozenset[str]) -> frozenset[str] | None:
        """Take (?i) or the like, and return the new flags. Return None if this is another group."""
        end = self.pattern.find(")", self.position)
        letters = self.pattern[self.position + 2 : end]
        if end < 0 or not letters or not set(letters) <= set("imxsadu-"):
            return None
        self.position = end + 1
        return _changed_flags(flags, letters)

    def _parse_atom(self, flags: frozenset[str], depth: int) -> _Node:
        character = self.take()
        if character == "(":
            return self._parse_group(flags, depth)
        if character in "^$":
            return _Node("assertion")
        text = character
        if character == "[":
            text += self._take_class()
        elif character == "\\":
            text += (escaped := self.take())
            if escaped in "bBAzZGK":
                return _Node("assertion")
            if escaped in "kg" or (escaped.isdigit() and escaped != "0"):  # a reference to a group
                if self.peek() in "<'":
                    self.take_until(">" if self.peek() == "<" else "'")
                return _Node("assertion")
            if escaped in "pPxouk" and self.peek() == "{":
                text += self.take_until("}")
            elif escaped in "xu":
                text += self.take(2 if escaped == "x" else 4)
        elif character in "*+?{|)" or (character.isspace() or character == "#"):
            text = "\\" + character  # a literal, also with the flag x
        return _Node("char", text=f"(?i:{text})" if "i" in flags else text)

    def _take_class(self) -> str:
        """Take the rest of a class after its opening bracket. Classes can be nested."""
        start, depth = self.position, 1
        if self.peek() == "^":
            self.take()
        if self.peek() == "]":  # a bracket at the beginning is a literal
            self.take()
        while depth and self.position < len(self.pattern):
            character = self.take()
            if character == "\\":
                self.take()
            elif character == "[" and self.peek() == ":":
                self.take_until(":]")
            else:
                depth += (character == "[") - (character == "]")
        return self.pattern[start : self.position]

    def _parse_group(self, flags: frozenset[str], depth: int) -> _Node:
        is_lookaround = False
        if self.peek(2) == "?#":
            self.take_until(")")
            return _Node("cat")
        if self.peek() == "?":
            self.take()
            if self.peek(2) in ("<=", "<!"):
                self.take(2)
                is_lookaround = True
            elif self.peek() in "=!":
                self.take()
                is_lookaround = True
            elif self.peek() in ":>~|":
                self.take()
            elif self.peek() in "<'":  # a name
                self.take()
                self.take_until(">" if self.pattern[self.position - 1] == "<" else "'")
            else:
                flags = _changed_flags(flags, self.take_until(":").rstrip(":"))
        body = self.parse_alternatives(flags, depth + 1)
        self.take()  # the closing parenthesis
        if is_lookaround:
            self.lookarounds.append(body)
            return _Node("assertion")
        return body

    def _parse_quantifiers(self, node: _Node, flags: frozenset[str]) -> _Node:
        while True:
            while "x" in flags and self.peek().isspace():
                self.take()
            bounds = self._take_bounds()
            if bounds is None:
                return node
            node = _Node("repeat", [node], low=bounds[0], high=bounds[1])

    def _take_bounds(self) -> tuple[int, int | None] | None:
        bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.peek() in bounds and self.peek():
            result = bounds[self.take()]
            if self.peek() in ("?", "+"):  # lazy or possessive: not another quantifier
                self.take()
            return result
        if self.peek() != "{":
            return None
        end = self.pattern.find("}", self.position, self.position + 20)
        numbers = self.pattern[self.position + 1 : end].split(",") if end >= 0 else []
        if len(numbers) > 2 or not any(numbers):
            return None
        if not all(number == "" or (number.isdecimal() and len(number) < 7) for number in numbers):
            return None
        self.position = end + 1
        if self.peek() == "?":
            self.take()
        low = int(numbers[0] or 0)
        return low, (int(numbers[-1]) if numbers[-1] else None)


def _changed_flags(flags: frozenset[str], letters: str) -> frozenset[str]:
    added, _, removed = letters.partition("-")
    return (flags | set(added)) - set(removed)


@dataclass
class _Automaton:
    """Position automaton: a state for each character of the expression, entered by reading that character."""

    assertions_match: bool
    """Whether assertions match the empty text. Otherwise they never match."""
    atoms: list[str] = field(default_factory=list)
    edges: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Transition between two states → number of ways in which the expression allows it."""

    def connect(self, last: Iterable[int], first: Sequence[int]) -> None:
        for source in last:
            for target in first:
                self.edges[source, target] += 1
            if len(self.edges) > MAX_EDGES:
                raise _TooComplexError

    def build(self, node: _Node) -> _Fragment:
        match node.kind:
            case "char":
                self.atoms.append(node.text)
                if len(self.atoms) > MAX_EDGES:
                    raise _TooComplexError
                state = (len(self.atoms) - 1,)
                return _Fragment(False, state, state)
            case "assertion":
                return _Fragment(self.assertions_match, (), ())
            case "alt":
                parts = [self.build(child) for child in node.children]
                first = tuple(state for part in parts for state in part.first)
                last = tuple(state for part in parts for state in part.last)
                return _Fragment(any(part.nullable for part in parts), first, last)
            case "cat":
                result = _EMPTY
                for child in node.children:
                    result = self._concatenate(result, self.build(child))
                return result
        return self._repeat(node)

    def _concatenate(self, left: _Fragment, right: _Fragment) -> _Fragment:
        self.connect(left.last, right.first)
        return _Fragment(
            left.nullable and right.nullable,
            left.first + (right.first if left.nullable else ()),
            right.last + (left.last if right.nullable else ()),
        )

    def _repeat(self, node: _Node) -> _Fragment:
        [child] = node.children
        low, high = node.low, node.high
        if high is None or high - low > _MAX_COPIES or (low > _MAX_COPIES and not _has_fixed_length(child)):
            low, high = min(low, 1), None  # many repetitions: as many as one likes
        low = min(low, _MAX_COPIES)
        result = _EMPTY
        for _ in range(max(low - (high is None), 0)):
            result = self._concatenate(result, self.build(child))
        if high is None:
            loop = self.build(child)
            self.connect(loop.last, loop.first)
            if loop.nullable and node.high is not None:  # each of a number of repetitions may match the empty text
                self.connect(loop.last, loop.first)
            return self._concatenate(result, loop._replace(nullable=loop.nullable or not low))
        optional = [self.build(child) for _ in range(min(high - node.low, _MAX_COPIES))]
        tail = _EMPTY
        for copy in reversed(optional):
            tail = self._concatenate(copy, tail)._replace(nullable=True)
        return self._concatenate(result, tail)


def _has_fixed_length(node: _Node) -> bool:
    """Whether the part has one way to match a number of characters that is always the same."""
    if node.kind == "alt" and len(node.children) > 1:
        return False
    return (node.kind != "repeat" or node.low == node.high) and all(map(_has_fixed_length, node.children))


def is_slow(pattern: str) -> bool:
    """Whether matching can take exponential time or a high power of it, or whether this is too complex to find out."""
    try:
        parser = _Parser(pattern)
        parts = [parser.parse_alternatives(frozenset())]
        return any(_is_ambiguous(part) for part in parts + parser.lookarounds)
    except (_TooComplexError, RecursionError):
        return True


def _is_ambiguous(node: _Node) -> bool:
    automaton, strict = _Automaton(assertions_match=True), _Automaton(assertions_match=False)
    automaton.build(node)
    ends = set(strict.build(node).last)  # states after which the expression has matched
    characters = _characters_by_atom(automaton.atoms)
    following: dict[int, list[int]] = {}
    for source, target in automaton.edges:
        if characters[automaton.atoms[target]]:
            following.setdefault(source, []).append(target)
    if _has_many_loops(following, ends, [characters[atom] for atom in automaton.atoms]):
        return True
    component = _strong_components(_as_tuples(following))
    inner = {
        source: [target for target in targets if component[source,] == component[target,]]
        for source, targets in following.items()
    }
    # Two ways to take one transition, or two paths with a common text.
    if any(automaton.edges[p, q] > 1 and q not in ends for p, targets in inner.items() for q in targets):
        return True
    pairs: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    pending: list[tuple[int, ...]] = [(state, state) for state, targets in inner.items() if targets]
    num_edges = 0
    while pending:
        pair = pending.pop()
        if pair in pairs:
            continue
        pairs[pair] = [
            (p, q)
            for p in inner.get(pair[0], ())
            for q in inner.get(pair[1], ())
            if characters[automaton.atoms[p]] & characters[automaton.atoms[q]]
        ]
        pending += pairs[pair]
        num_edges += len(pairs[pair])
        if num_edges > MAX_EDGES:
            raise _TooComplexError
    component = _strong_components(pairs)
    diverging = {component[pair] for pair in pairs if pair[0] != pair[1]}
    return any(pair[0] == pair[1] and pair[0] not in ends and component[pair] in diverging for pair in pairs)


def _has_many_loops(following: dict[int, list[int]], ends: set[int], characters: list[frozenset[str]]) -> bool:
    """Whether over MAX_LOOPS loops over one character follow each other, and the expression may fail after them."""
    kinds = {frozenset(atoms) for atoms in _states_by_character(characters).values()}
    for states in kinds:
        graph = {p: [q for q in following.get(p, ()) if q in states] for p in states}
        component = _strong_components(_as_tuples(graph))  # in reverse topological order
        loops = {component[p,] for p, targets in graph.items() for q in targets if component[p,] == component[q,]}
        harmless = {component[p,] for p in states & ends}
        num_loops: dict[int, int] = dict.fromkeys(component.values(), 0)
        for (state,), number in component.items():
            after = max((num_loops[component[q,]] for q in graph[state] if component[q,] != number), default=0)
            count = after + (number in loops) if after else int(number in loops and number not in harmless)
            num_loops[number] = max(num_loops[number], count)
        if max(num_loops.values()) > MAX_LOOPS:
            return True
    return False


def _states_by_character(characters: list[frozenset[str]]) -> dict[str, set[int]]:
    states: dict[str, set[int]] = {}
    for state, members in enumerate(characters):
        for character in members:
            states.setdefault(character, set()).add(state)
    return states


def _as_tuples(graph: dict[int, list[int]]) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    return {(source,): [(target,) for target in targets] for source, targets in graph.items()}


def _characters_by_atom(atoms: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the sample characters and literals that each atom matches, according to the engine itself."""
    atoms = set(atoms)
    samples = "".join(sorted({*_SAMPLES, *"".join(atoms)}))
    matched = {}
    for atom in atoms:
        try:
            rest = normalizers.Replace(Regex(atom), "").normalize_str(samples)
        except Exception:  # a part that is not an expression of its own may match anything
            rest = ""
        matched[atom] = frozenset(samples) - frozenset(rest)
    return matched


def _strong_components(graph: dict[tuple[int, ...], list[tuple[int, ...]]]) -> dict[tuple[int, ...], int]:
    """Return the number of the strongly connected component of each node (Tarjan 1972, without recursion)."""
    index: dict[tuple[int, ...], int] = {}
    low: dict[tuple[int, ...], int] = {}
    component: dict[tuple[int, ...], int] = {}
    stack: list[tuple[int, ...]] = []
    for root in graph:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        work = [(root, iter(graph[root]))]
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(graph.get(target, ()))))
                    break
                if target not in component:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    while True:
                        member = stack.pop()
                        component[member] = index[node]
                        if member == node:
                            break
    return component
