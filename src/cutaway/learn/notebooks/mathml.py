"""Convert the TeX of the notebooks' formulas to MathML, which browsers draw without a script."""

import re
import unicodedata
from collections.abc import Callable
from html import escape

from cutaway.errors import CutawayError

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_IDENTIFIERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "vartheta": "ϑ", "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "upsilon": "υ", "phi": "ϕ", "varphi": "φ", "chi": "χ", "psi": "ψ",
    "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π", "Sigma": "Σ",
    "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω", "ell": "ℓ", "infty": "∞", "partial": "∂", "nabla": "∇", "hbar": "ℏ",
    "emptyset": "∅", "Re": "ℜ", "Im": "ℑ", "dots": "…", "ldots": "…", "cdots": "⋯", "vdots": "⋮", "ddots": "⋱",
}  # fmt: skip
_OPERATORS = {
    "cdot": "⋅", "times": "×", "div": "÷", "pm": "±", "mp": "∓", "odot": "⊙", "oplus": "⊕", "otimes": "⊗", "circ": "∘",
    "ast": "∗", "star": "⋆", "top": "⊤", "bot": "⊥", "perp": "⊥", "to": "→", "rightarrow": "→", "leftarrow": "←",
    "gets": "←", "mapsto": "↦", "Rightarrow": "⇒", "Leftarrow": "⇐", "Leftrightarrow": "⇔", "iff": "⇔", "implies": "⇒",
    "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "ll": "≪", "gg": "≫", "approx": "≈",
    "sim": "∼", "simeq": "≃", "equiv": "≡", "propto": "∝", "in": "∈", "notin": "∉", "subset": "⊂", "subseteq": "⊆",
    "cup": "∪", "cap": "∩", "setminus": "∖", "forall": "∀", "exists": "∃", "neg": "¬", "land": "∧", "lor": "∨",
    "mid": "∣", "vert": "|", "lvert": "|", "rvert": "|", "Vert": "‖", "lVert": "‖", "rVert": "‖", "langle": "⟨",
    "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "prime": "′", "colon": ":",
    "lbrace": "{", "rbrace": "}",
}  # fmt: skip
_LARGE_OPERATORS = {"sum": "∑", "prod": "∏", "int": "∫", "bigcup": "⋃", "bigcap": "⋂"}
_FUNCTIONS = (
    "arg", "cos", "cosh", "cot", "det", "dim", "exp", "gcd", "inf", "ker", "lim", "liminf", "limsup", "ln", "log",
    "max", "min", "Pr", "sin", "sinh", "sup", "tan", "tanh",
)  # fmt: skip
_LIMIT_FUNCTIONS = ("det", "gcd", "inf", "lim", "liminf", "limsup", "max", "min", "Pr", "sup")
_SPACES = {
    ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.25em", "quad": "1em",
    "qquad": "2em", "thinspace": "0.17em",
}  # fmt: skip
_ACCENTS = {"hat": "^", "widehat": "^", "bar": "¯", "overline": "¯", "tilde": "~", "vec": "→", "dot": "˙", "ddot": "¨"}
_BIG_SIZES = {"big": "1.2em", "Big": "1.8em", "bigg": "2.4em", "Bigg": "3em"}
_UPRIGHT = ("text", "textrm", "mathrm", "operatorname", "mathsf", "mathtt", "textbf")
_ALPHABETS = {"mathbf": "BOLD", "boldsymbol": "BOLD", "mathbb": "DOUBLE-STRUCK", "mathcal": "SCRIPT"}
_FENCES = {"matrix": ("", ""), "pmatrix": ("(", ")"), "bmatrix": ("[", "]"), "vmatrix": ("|", "|"), "cases": ("{", "")}
_FENCES |= {"aligned": ("", ""), "array": ("", "")}


class UnsupportedTexError(CutawayError):
    """A formula has a command that the conversion does not support."""


def tex_to_mathml(tex: str, *, display: bool = False) -> str:
    """Return a formula as a <math> element; raise UnsupportedTexError if it has an unknown command."""
    attribute = ' display="block"' if display else ""
    return f"<math{attribute}>{_Converter(tex, display=display).convert()}</math>"


class _Converter:
    """Recursive-descent parser of one formula."""

    def __init__(self, tex: str, *, display: bool) -> None:
        self.tokens, self.position, self.display = _TOKEN.findall(tex), 0, display
        self.tex = tex

    def convert(self) -> str:
        row = self.row(())
        if self.position < len(self.tokens):
            raise self.error(f"'{self.peek()}' without a counterpart")
        return row

    def error(self, problem: str) -> UnsupportedTexError:
        return UnsupportedTexError(f"the formula '{self.tex}' has {problem}; add it to {__name__}")

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def skip_spaces(self) -> None:
        while self.peek().isspace():
            self.position += 1

    def row(self, ends: tuple[str, ...]) -> str:
        """Convert up to one of the tokens `ends`, which is not consumed, or up to the end."""
        parts: list[str] = []
        self.skip_spaces()
        while self.peek() and self.peek() not in (*ends, "}"):
            parts.append(self.scripted_atom())
            self.skip_spaces()
        return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"

    def scripted_atom(self) -> str:
        """Convert one atom with its subscript and superscript."""
        name = self.peek().removeprefix("\\")
        base = "<mrow></mrow>" if self.peek() in "^_" else self.atom()
        lower = upper = ""
        while True:
            self.skip_spaces()
            if self.peek() == "_" and not lower:
                self.next()
                lower = self.argument()
            elif self.peek() == "^" and not upper:
                self.next()
                upper = self.argument()
            elif self.peek() == "'" and not upper:
                self.next()
                upper = "<mo>′</mo>"
            else:
                break
        if not lower and not upper:
            return base
        over = self.display and (name in _LARGE_OPERATORS or name in _LIMIT_FUNCTIONS)
        names = ("munder", "mover", "munderover") if over else ("msub", "msup", "msubsup")
        tag = names[2] if lower and upper else names[1] if upper else names[0]
        return f"<{tag}>{base}{lower}{upper}</{tag}>"

    def argument(self) -> str:
        """Convert the argument of a command: a group in braces, or one token."""
        self.skip_spaces()
        if self.peek() == "{":
            return self.group()
        if self.peek().isdigit():  # `\frac12` has two arguments
            return f"<mn>{self.next()}</mn>"
        return self.atom()

    def group(self) -> str:
        self.next()
        row = self.row(())
        if self.next() != "}":
            raise self.error("an unclosed brace")
        return row

    def raw_group(self) -> str:
        """Return the text of a group in braces, or the next token."""
        self.skip_spaces()
        if self.peek() != "{":
            return self.next()
        self.next()
        depth, parts = 1, list[str]()
        while self.peek():
            token = self.next()
            depth += (token == "{") - (token == "}")
            if not depth:
                return "".join(parts)
            parts.append(token)
        raise self.error("an unclosed brace")

    def atom(self) -> str:
        token = self.peek()
        if token == "{":
            return self.group()
        if token.startswith("\\"):
            self.next()
            return self.command(token[1:])
        if token.isdigit() or (token == "." and self.following().isdigit()):
            return self.number()
        self.next()
        if token.isalpha():
            return f"<mi>{token}</mi>"
        stretchy = ' stretchy="false"' if token in "()[]|/" else ""
        return f"<mo{stretchy}>{'−' if token == '-' else escape(token)}</mo>"

    def following(self) -> str:
        return self.tokens[self.position + 1] if self.position + 1 < len(self.tokens) else ""

    def number(self) -> str:
        digits = self.next()
        while self.peek().isdigit() or (self.peek() == "." and self.following().isdigit()):
            digits += self.next()
        return f"<mn>{digits}</mn>"

    def command(self, name: str) -> str:
        if name in _IDENTIFIERS:
            return f"<mi>{_IDENTIFIERS[name]}</mi>"
        if name in _OPERATORS:
            stretchy = ' stretchy="false"' if _OPERATORS[name] in "|‖⟨⟩⌊⌋⌈⌉{}" else ""
            return f"<mo{stretchy}>{_OPERATORS[name]}</mo>"
        if name in _LARGE_OPERATORS:
            return f"<mo>{_LARGE_OPERATORS[name]}</mo>"
        if name in _FUNCTIONS:
            return f"<mi>{name}</mi>"
        if name in _SPACES:
            return f'<mspace width="{_SPACES[name]}"></mspace>'
        if name in _UPRIGHT:
            text = escape(self.raw_group()).replace(" ", "\N{NO-BREAK SPACE}")  # MathML ignores spaces at the ends
            return f"<mtext>{text}</mtext>"
        if name in _ALPHABETS:
            return f"<mi>{escape(''.join(_styled(letter, _ALPHABETS[name]) for letter in self.raw_group()))}</mi>"
        if name in _ACCENTS:
            return f'<mover accent="true">{self.argument()}<mo>{_ACCENTS[name]}</mo></mover>'
        for prefix in ("", "l", "r"):  # \Big(, \Bigl(, \Bigr)
            size = _BIG_SIZES.get(name.removesuffix(prefix)) if name.endswith(prefix) else None
            if size:
                return f'<mo stretchy="true" minsize="{size}" maxsize="{size}">{self.delimiter()}</mo>'
        return self.structure(name)

    def structure(self, name: str) -> str:
        """Convert a command with a structure of its own, such as a fraction."""
        structures: dict[str, Callable[[], str]] = {
            "frac": self.fraction, "tfrac": self.fraction, "dfrac": self.fraction, "sqrt": self.root,
            "left": self.fenced, "begin": self.environment, "bmod": lambda: "<mo>mod</mo>",
            "underbrace": lambda: f"<munder>{self.argument()}<mo>⏟</mo></munder>",
            "displaystyle": lambda: "", "{": lambda: "<mo>{</mo>", "}": lambda: "<mo>}</mo>",
            "|": lambda: '<mo stretchy="false">‖</mo>', "%": lambda: "<mo>%</mo>", "_": lambda: "<mo>_</mo>",
            "$": lambda: "<mo>$</mo>", "&": lambda: "<mo>&amp;</mo>", "#": lambda: "<mo>#</mo>",
        }  # fmt: skip
        if name not in structures:
            raise self.error(f"the unknown command '\\{name}'")
        return structures[name]()

    def fraction(self) -> str:
        return f"<mfrac>{self.argument()}{self.argument()}</mfrac>"

    def root(self) -> str:
        if self.peek() != "[":
            return f"<msqrt>{self.argument()}</msqrt>"
        self.next()
        index = self.row(("]",))
        self.next()
        return f"<mroot>{self.argument()}{index}</mroot>"

    def delimiter(self) -> str:
        self.skip_spaces()
        token = self.next()
        if token == ".":
            return ""
        name = token.removeprefix("\\")
        return escape({"|": "‖", "{": "{", "}": "}"}.get(name, _OPERATORS.get(name, name)) if name != token else token)

    def fenced(self) -> str:
        opening = self.delimiter()
        body = self.row(("\\right",))
        if self.next() != "\\right":
            raise self.error("\\left without \\right")
        return f"<mrow><mo>{opening}</mo>{body}<mo>{self.delimiter()}</mo></mrow>"

    def environment(self) -> str:
        name = self.raw_group().removesuffix("*")
        if name not in _FENCES:
            raise self.error(f"the unknown environment '{name}'")
        if name == "array":
            self.raw_group()
        rows: list[list[str]] = [[]]
        while True:
            rows[-1].append(self.row(("&", "\\\\", "\\end")))
            end = self.next()
            if end == "\\\\":
                rows.append([])
            elif end != "&":
                break
        if end != "\\end" or self.raw_group().removesuffix("*") != name:
            raise self.error(f"an environment '{name}' without an end")
        cells = ["".join(f"<mtd>{cell}</mtd>" for cell in row) for row in rows if row != ["<mrow></mrow>"]]
        table = f"<mtable>{''.join(f'<mtr>{row}</mtr>' for row in cells)}</mtable>"
        opening, closing = _FENCES[name]
        return f"<mrow><mo>{opening}</mo>{table}<mo>{closing}</mo></mrow>" if opening or closing else table


def _styled(letter: str, alphabet: str) -> str:
    """Return a letter of a mathematical alphabet, such as 𝐱 or ℝ, or the letter itself if the alphabet lacks it."""
    kind = "CAPITAL" if letter.isupper() else "SMALL"
    for prefix in ("MATHEMATICAL ", ""):
        try:
            return unicodedata.lookup(f"{prefix}{alphabet} {kind} {letter.upper()}")
        except KeyError:
            continue
    return letter
