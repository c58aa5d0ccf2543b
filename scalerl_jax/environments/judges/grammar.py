r"""Mathematical expressions, read as trees.

Sums, products, fractions, powers, roots, factorials (n! and n!!), elementary
functions, absolute values, floors and ceilings, in LaTeX or plain.  A tree is an
operation and its operands, which are trees or texts: ("+", ("name", "x"), ("number",
Fraction(1))).  Letters are names, but for `e` and `i`; a whole number before a fraction
of numbers is a mixed number, 2\frac34 and 2 3/4.
"""

import re
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]

FUNCTIONS = tuple(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh "
    "coth exp ln log lg".split()
)
_TOKEN = re.compile(
    r"\s*(?:(?P<start>\d*\.\d*)"
    r"(?:\\(?:overline|bar|dot)\s*\{?(?P<period>\d+)\}?|\((?P<digits>\d+)\)(?!\s*\^))"
    r"|(?P<mantissa>\d+(?:\.\d+)?|\.\d+)(?P<e>[eE])(?P<exponent>[-+]?\d+)(?![\w.])"
    r"|(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<symbol>\\[A-Za-z]+|\\.|\S))"
)
_MAX_EXPONENT = 10_000  # of scientific notation
# Commands that are names, those that make one of the group after them, and of letters.
_NAMES = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa "
    "lambda mu nu xi rho varrho sigma tau upsilon phi varphi chi psi omega Gamma Delta "
    "Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega infty ell hbar emptyset "
    "ldots".split()
)
_LETTERS = {"angle", "triangle"}
_NAMING = set(
    "mathbb mathcal mathscr mathfrak overline bar vec hat tilde overrightarrow widehat "
    "widetilde".split()
)
_TIMES = ("\\cdot", "\\times", "*")
_BRACKETS = {"(": ")", "[": "]", "{": "}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_ROUNDING = {"\\lfloor": "floor", "\\lceil": "ceil"}
# Commands that a factor may begin with.
_STARTING = {"frac", "sqrt", "binom", "pi", "imath", "lfloor", "lceil", *FUNCTIONS}
_STARTING |= _NAMES | _LETTERS | _NAMING
_ZERO, _ONE = ("number", Fraction(0)), ("number", Fraction(1))


class Unreadable(ValueError):
    """The text is not an expression of this grammar."""


class Token(str):
    """A symbol, or a number as it is written; `value` is that of a number."""

    value: Fraction | None = None

    def __new__(cls, text: str, value: Fraction | None = None) -> "Token":
        """Make a number, or a symbol where no value is given."""
        made = super().__new__(cls, text)
        made.value = value
        return made


_END = Token("")


class ExpressionReader:
    """Reads one expression by recursive descent.

    Attributes:
        names: the variables met.
        decimal: whether a number has a decimal point.
        doubtful: whether something can be read in more than one way, as 1/2x.
    """

    def __init__(self, text: str) -> None:
        """Cut the text into tokens."""
        self.names: set[str] = set()
        self.decimal = False
        self.doubtful = False
        self._tokens: list[Token] = []
        self._next = 0
        self._bars = 0  # absolute values that are open
        for found in _TOKEN.finditer(text.rstrip()):
            self._tokens += self._tokens_of(found)

    def _tokens_of(self, found: re.Match[str]) -> list[Token]:
        written = found.group().strip()
        if period := found["period"] or found["digits"]:  # 0.1\overline{6}, 0.1(6)
            return [Token(written, _repeating(found["start"], period))]
        if found["mantissa"]:
            exponent = int(found["exponent"])
            if abs(exponent) > _MAX_EXPONENT:
                raise Unreadable(written)
            whole = "." not in found["mantissa"]
            self.decimal |= not whole or exponent < 0
            # 2e-3 may be 2 e - 3.
            self.doubtful |= whole and found["e"] == "e" and written[-2] in "+-"
            return [Token(written, Fraction(found["mantissa"]) * _power(exponent))]
        if found["number"]:
            self.decimal |= "." in written
            return [Token(written, Fraction(written))]
        name = written[1:]
        if name.isalpha() and name not in _STARTING and len(name) > 2:
            known = [each for each in _STARTING if name.startswith(each)]
            if known:  # \piR
                longest = max(known, key=len)
                return [Token("\\" + longest), *map(Token, name[len(longest) :])]
        return [Token(written)]

    def read(self) -> Tree:
        """Return the tree of the whole text.

        Raises:
            Unreadable: the text has no tree.
        """
        tree = self._ratio()
        if self._next < len(self._tokens):
            raise Unreadable(self._peek())
        return tree

    def _peek(self) -> Token:
        return self._tokens[self._next] if self._next < len(self._tokens) else _END

    def _take(self) -> Token:
        self._next += 1
        return self._tokens[self._next - 1]

    def _accept(self, *symbols: str) -> str:
        """Take and return the next token if it is among these; else return ""."""
        return self._take() if self._peek() in symbols and self._peek() else ""

    def _expect(self, symbol: str) -> None:
        if not self._accept(symbol):
            raise Unreadable(f"no {symbol}")

    def _ratio(self) -> Tree:
        tree = self._sum()
        return ("/", tree, self._sum()) if self._accept(":") else tree

    def _sum(self) -> Tree:
        tree = self._term()
        while sign := self._accept("+", "-"):
            tree = (sign, tree, self._term())
        return tree

    def _term(self) -> Tree:
        tree = self._signed(self._product)
        while sign := self._accept("/", "\\div", *_TIMES):
            factor = self._signed(self._product)
            if sign in _TIMES:
                tree = ("*", tree, factor)
            else:  # 1/2x is half of x or one over it
                self.doubtful |= factor[0] == "*"
                tree = ("/", tree, factor)
        return tree

    def _signed(self, read: Any) -> Tree:
        if self._accept("-"):
            return ("-", _ZERO, self._signed(read))
        return self._signed(read) if self._accept("+") else read()

    def _product(self, *stop: str) -> Tree:
        """Read factors that follow one another without a sign between them."""
        tree = self._plain_mixed(self._factor())
        while self._starts_factor(stop):
            typeset = self._peek() == "\\frac"
            factor = self._factor()
            fraction = factor[0] == "/" and all(map(_is_whole, factor[1:]))
            mixed = fraction and _is_whole(tree)
            self.doubtful |= mixed and not typeset  # 1(4/5)
            tree = ("+" if mixed and typeset else "*", tree, factor)
        return tree

    def _plain_mixed(self, tree: Tree) -> Tree:
        """Return 2 3/4 where a proper fraction of numbers follows a whole one."""
        before = self._tokens[self._next - 1]
        above, bar, below = (*self._tokens[self._next : self._next + 3], *[_END] * 3)[
            :3
        ]
        if before.value is None or not _is_whole(tree) or bar != "/":
            return tree
        if not (above.isdecimal() and below.isdecimal() and int(above) < int(below)):
            return tree
        self._next += 3
        return ("+", tree, ("number", Fraction(int(above), int(below))))

    def _starts_factor(self, stop: tuple[str, ...]) -> bool:
        token = self._peek()
        if token.value is not None or token in stop:
            return False
        if token == "|":
            return not self._bars
        return token.isalpha() or token in _BRACKETS or token[1:] in _STARTING

    def _factor(self) -> Tree:
        tree = self._base()
        while sign := self._accept("!", "^"):
            if sign == "!":
                tree = self._factorial(tree)
            elif self._accepts_degree():
                tree = ("*", tree, ("/", ("pi",), ("number", Fraction(180))))
            else:
                tree = ("^", tree, self._exponent())
        return tree

    def _factorial(self, tree: Tree) -> Tree:
        """Return n! behind its sign; 5!! is 5 * 3 * 1, and 5!!! is not read."""
        if not self._accept("!"):
            return ("!", tree)
        if self._peek() == "!":
            raise Unreadable("!!!")
        self.doubtful |= has_names(tree)  # (2n)!! = 2^n n! holds for whole n only
        return ("!!", tree)

    def _accepts_degree(self) -> bool:
        for degree in (["\\circ"], ["{", "\\circ", "}"]):
            if self._tokens[self._next : self._next + len(degree)] == degree:
                self._next += len(degree)
                return True
        return False

    def _exponent(self) -> Tree:
        tree = self._signed(self._base)
        return ("^", tree, self._exponent()) if self._accept("^") else tree

    def _base(self) -> Tree:
        if not self._peek():
            raise Unreadable("something is missing")
        token = self._take()
        if token.value is not None:
            return ("number", token.value)
        if token == "|":
            return self._absolute()
        if token in _BRACKETS:
            inside = self._within(token)
            return (_ROUNDING[token], inside) if token in _ROUNDING else inside
        if token.isalpha():
            return self._letter(token)
        return self._command(token[1:])

    def _within(self, opening: str) -> Tree:
        bars, self._bars = self._bars, 0
        inside = self._ratio()
        self._expect(_BRACKETS[opening])
        self._bars = bars
        return inside

    def _absolute(self) -> Tree:
        self._bars += 1
        inside = self._ratio()
        self._expect("|")
        self._bars -= 1
        return ("abs", inside)

    def _letter(self, letter: str) -> Tree:
        name = letter + self._subscript()
        while self._accept("'"):
            name += "'"
        if self._peek() == "(" and letter in "fgh":
            self._take()
            return ("unknown", name, self._within("("))
        self.doubtful |= self._peek() == "(" and letter in "FGHPQ"
        return (name,) if name in ("e", "i") else self._named(name)

    def _named(self, name: str) -> Tree:
        self.names.add(name)
        return ("name", name)

    def _subscript(self) -> str:
        return "_" + self._written_group() if self._accept("_") else ""

    def _written_group(self) -> str:
        """Take a group or one token, as it is written without spaces."""
        token = self._take() if self._peek() else _END
        if token != "{":
            return token
        written, depth = "", 1
        while depth:
            if not self._peek():
                raise Unreadable("an open brace")
            token = self._take()
            depth += (token == "{") - (token == "}")
            written += token if depth else ""
        return written

    def _command(self, name: str) -> Tree:
        if name == "frac":
            return ("/", self._argument(), self._argument())
        if name == "binom":
            return ("binom", self._argument(), self._argument())
        if name == "sqrt":
            index = self._within("[") if self._accept("[") else ("number", Fraction(2))
            return ("root", self._argument(), index)
        if name in ("pi", "imath"):
            return (name[0],) if name == "imath" else (name,)
        if name in FUNCTIONS:
            return self._function(name)
        if name in _NAMES:
            return self._named(f"\\{name}{self._subscript()}")
        if name not in _NAMING | _LETTERS:
            raise Unreadable(name)
        written = self._written_group()
        while name in _LETTERS and self._peek().isalpha():
            written += self._take()
        return self._named(f"\\{name} {written}{self._subscript()}")

    def _argument(self) -> Tree:
        """Take what a command takes: a group, or one digit, letter or command."""
        token = self._peek()
        if opening := self._accept("{", "("):
            return self._within(opening)
        if token.isdecimal() and len(token) > 1:  # \frac12
            self._tokens[self._next] = Token(token[1:], Fraction(token[1:]))
            return ("number", Fraction(token[0]))
        return self._base()

    def _function(self, name: str) -> Tree:
        r"""Read a function with its base, its power and its argument: \log_2 8."""
        base = self._argument() if self._accept("_") else None
        power = self._argument() if self._accept("^") else None
        if power == ("-", _ZERO, _ONE):
            if f"arc{name}" not in FUNCTIONS:
                raise Unreadable("an inverse")
            name, power = f"arc{name}", None
        self.doubtful |= name == "log" and base is None
        if opening := self._accept("(", "{"):
            argument = self._within(opening)
        else:
            argument = self._product(*(f"\\{each}" for each in FUNCTIONS))
            self.doubtful |= argument[0] in ("*", "^", "!", "!!")
        tree: Tree = ("function", name, argument)
        if base is not None:
            tree = ("/", tree, ("function", name, base))
        return tree if power is None else ("^", tree, power)


def _power(exponent: int) -> Fraction:
    return Fraction(10) ** exponent


def has_names(tree: Tree) -> bool:
    """Return whether a tree has variables."""
    if tree[0] in ("name", "unknown"):
        return True
    return any(isinstance(part, tuple) and has_names(part) for part in tree[1:])


def _is_whole(tree: Tree) -> bool:
    return tree[0] == "number" and tree[1].denominator == 1


def _repeating(start: str, period: str) -> Fraction:
    r"""0.1\overline{6} as a fraction."""
    whole, _, decimals = start.partition(".")
    tail = Fraction(int(period), 10 ** len(period) - 1)
    return Fraction(int(whole + decimals or "0") + tail) / 10 ** len(decimals)
