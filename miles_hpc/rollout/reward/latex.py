r"""Mathematical notation to exact values: LaTeX and plain text, tokens first.

    expression = [sign] term {("+" | "-") term}
    term       = factor {["*" | "/"] factor}          a whole number before a fraction of numbers: a mixed number
    factor     = atom {"^" exponent | "!"}
    atom       = number | letter | constant | \frac | \sqrt | \binom | function | ( expression ) | "|" expression "|"

Nothing is evaluated that isn't in this grammar, and all of it within bounds of length, depth and work: hostile input
raises TooHard in milliseconds.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from math import comb, factorial

from miles_hpc.rollout.reward.exact import Budget, TooHard, Value, named, number, power, root
from miles_hpc.rollout.reward.notation import (
    ALIASES,
    FUNCTIONS,
    GREEK,
    SHORT_WORDS,
    SILENT,
    SUPERSCRIPTS,
    SYMBOLS,
    WORDS,
)

__all__ = ["MAX_TEXT", "parse_value", "tokenize"]

MAX_TEXT = 2000  # characters of an answer that is understood; longer ones are compared as they are
MAX_DIGITS = 500
MAX_DEPTH = 40

_GROUPED = r"[1-9]\d{0,2}(?:(?:COMMA\{,\}|,\\!|\\,)\d{3})+(?!\d)(?:\.\d+)?"
_REST = r"""
  | (?P<repeating>\d+\.\d*\\overline\{\d+\})
  | (?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)
  | (?P<special>\\(?:begin|end|mathbb)\s*\{\w+\*?\})
  | (?P<command>\\(?:[a-zA-Z]+|.))
  | (?P<word>[A-Za-z]+)
  | (?P<operator>\*\*|<=|>=|!=|==|\S)
"""
# Between brackets a comma separates, elsewhere it may group digits.
_OUTSIDE = re.compile(r"\s*(?:(?P<grouped>" + _GROUPED.replace("COMMA", ",|") + ")" + _REST + r")", re.VERBOSE)
_INSIDE = re.compile(r"\s*(?:(?P<grouped>" + _GROUPED.replace("COMMA", "") + ")" + _REST + r")", re.VERBOSE)
_OPENING, _CLOSING = frozenset({"(", "[", r"\{"}), frozenset({")", "]", r"\}"})


def tokenize(text: str) -> list[str]:
    r"""Tokens of an answer: numbers as written in plain digits ("1234.5", "0.(3)"), letters, commands, operators.

    Raises TooHard for text that is too long, and for words, which are no mathematics.
    """
    if len(text) > MAX_TEXT:
        raise TooHard("long text")
    text = _plain(text).strip()
    if len(text) > 2 * MAX_TEXT:  # one character can stand for many
        raise TooHard("long text")
    found: list[str] = []
    at = depth = 0
    while at < len(text):
        match = (_INSIDE if depth else _OUTSIDE).match(text, at)
        if match is None:  # white space at the end
            break
        at = match.end()
        token, kind = match[match.lastgroup or 0], match.lastgroup
        if kind == "number" and token.startswith("."):
            found.append("0" + token)
        elif kind == "grouped":
            found.append(re.sub(r"[^\d.]", "", token))
        elif kind == "repeating":
            found.append(token.replace(r"\overline{", "(").replace("}", ")"))
        elif kind == "word":
            found += _letters(token)
        elif token not in SILENT and token != "$":
            found.append(ALIASES.get(re.sub(r"\s", "", token), re.sub(r"\s", "", token)))
        depth += (token in _OPENING) - (token in _CLOSING)
    return found


def _plain(text: str) -> str:
    out: list[str] = []
    for run in re.findall("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+|[^⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]", text):
        if run[0] in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ":
            out.append("^{" + run.translate(SUPERSCRIPTS) + "}")
        elif run in SYMBOLS:
            out.append(SYMBOLS[run])
        elif "⁄" in (wide := unicodedata.normalize("NFKC", run)):  # a fraction in one character
            out.append(" " + wide.replace("⁄", "/") + " ")
        else:
            out.append(SYMBOLS.get(wide, wide))
    return "".join(out)


def _letters(word: str) -> list[str]:
    known = WORDS.get(word) or WORDS.get(word.lower() if word.lower() in ("and", "or") else word)
    if known is not None:
        return [known]
    if len(word) > 2 or word.lower() in SHORT_WORDS:
        raise TooHard("a word")
    return list(word)


def parse_value(tokens: Sequence[str], budget: Budget) -> Value:
    """The exact value of an expression; raises TooHard for what isn't one, or is beyond the bounds."""
    parser = _Parser(tokens, budget)
    value = parser.expression()
    if parser.at < len(tokens):
        raise TooHard(f"unexpected {tokens[parser.at]!r}")
    return value


#: Shapes of a mixed number, beside \frac12 after a whole number; "d" is a whole number.
_MIXED = (r"d\frac{d}{d}", r"d\fracd{d}", r"d\frac{d}d")


class _Parser:
    def __init__(self, tokens: Sequence[str], budget: Budget) -> None:
        self.tokens = list(tokens)
        self.budget = budget
        self.at = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.peek()
        if not token or (wanted is not None and token != wanted):
            raise TooHard(f"expected {wanted or 'more'}, seen {token!r}")
        self.at += 1
        self.budget.spend(1)
        return token

    def expression(self) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooHard("deep nesting")
        total = self.term()
        while self.peek() in ("+", "-"):
            minus = self.take() == "-"
            term = self.term()
            total = total.minus(term, self.budget) if minus else total.plus(term, self.budget)
        self.depth -= 1
        return total

    def term(self) -> Value:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.take() == "-"
        value = self.mixed_number() or self.factor()
        while True:
            token = self.peek()
            if token in ("*", "/"):
                self.take()
                minus = self.peek() == "-" and bool(self.take())
                factor = self.factor()
                factor = factor.negative() if minus else factor
                value = value.times(factor, self.budget) if token == "*" else value.over(factor, self.budget)
            elif self.starts_factor(token):
                if token[0].isdecimal():  # "2 3" is no product
                    raise TooHard("two numbers side by side")
                value = value.times(self.factor(), self.budget)
            else:
                return value.negative() if negative else value

    def mixed_number(self) -> Value | None:
        r"""1 1/2 and 1\frac{1}{2}, of whole numbers only; None when it isn't one."""
        shape = "".join("d" if t.isdecimal() else t for t in self.tokens[self.at : self.at + 8])
        if shape.startswith("dd/d"):
            whole, top, _, bottom = (self.take() for _ in range(4))
            value = _number(whole).plus(_number(top).over(_number(bottom), self.budget), self.budget)
        elif shape.startswith(_MIXED) or (shape.startswith(r"d\fracd") and len(self.peek(2)) == 2):
            value = _number(self.take()).plus(self.atom(), self.budget)
        else:
            return None
        if self.peek() in ("^", "!"):
            raise TooHard("power of a mixed number")
        return value

    def starts_factor(self, token: str) -> bool:
        if token == "|":
            return self.bars == 0
        return (
            token[:1].isalnum()
            or token in ("(", "{", r"\frac", r"\sqrt", r"\binom", r"\pi")
            or token in FUNCTIONS
            or token in GREEK
        )

    def factor(self) -> Value:
        value = self.atom()
        while self.peek() in ("^", "!"):
            if self.take() == "!":
                n = value.rational()
                if n is None or n.denominator != 1 or not 0 <= n <= 300:
                    raise TooHard("factorial")
                value = number(factorial(int(n)))
            else:
                value = power(value, self.exponent(), self.budget)
        return value

    def exponent(self) -> Value:
        """A group, or one signed factor: 2^3^2 is 2^(3^2)."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooHard("deep nesting")
        minus = self.peek() == "-" and bool(self.take())
        value = self.group() if self.peek() == "{" else self.factor()
        self.depth -= 1
        return value.negative() if minus else value

    def group(self, *, digits: bool = False) -> Value:
        """{expression}, or an atom; with `digits` only the first digit of a number, as LaTeX reads it in \\frac12."""
        if digits and self.peek().isdecimal() and len(self.peek()) > 1:
            digit, self.tokens[self.at] = self.peek()[0], self.peek()[1:]
            return _number(digit)
        if self.peek() == "{":
            self.take()
            value = self.expression()
            self.take("}")
            return value
        return self.atom()

    def atom(self) -> Value:
        token = self.take()
        if token[0].isdecimal():
            if self.peek() == "_":
                return self.in_base(token)
            return _number(token)
        if token in ("(", "{"):
            value = self.expression()
            self.take(")" if token == "(" else "}")
            return value
        if token == r"\frac":
            top = self.group(digits=True)
            return top.over(self.group(digits=True), self.budget)
        if token == r"\sqrt":
            return self.root()
        if token == r"\binom":
            return self.binomial()
        if token == "|" and self.bars == 0:
            return self.absolute()
        if token == r"\pi":
            return named("pi")
        if token in FUNCTIONS:
            return self.function(token)
        if (len(token) == 1 and token.isalpha()) or token in GREEK:
            return named(token + self.subscript())
        raise TooHard(f"unexpected {token!r}")

    def subscript(self) -> str:
        if self.peek() != "_":
            return ""
        self.take()
        if self.peek() != "{":
            return "_" + self.take()
        self.take()
        parts = []
        while self.peek() != "}":
            parts.append(self.take())
        self.take()
        return "_" + "".join(parts)

    def in_base(self, digits: str) -> Value:
        """1101_2: a whole number in another base, of decimal digits."""
        base = self.subscript()[1:]
        if not (digits.isdecimal() and base.isdecimal() and len(base) <= 2 and 2 <= int(base) <= 36):
            raise TooHard("number in another base")
        if any(int(d) >= int(base) for d in digits):
            raise TooHard("digit that the base doesn't have")
        return number(int(digits, int(base)))

    def root(self) -> Value:
        order = 2
        if self.peek() == "[":
            self.take()
            digits = self.take()
            if not digits.isdecimal() or len(digits) > 3:
                raise TooHard("order of a root")
            order = int(digits)
            self.take("]")
        return root(self.group(), order, self.budget)

    def binomial(self) -> Value:
        n, k = self.group(digits=True).rational(), self.group(digits=True).rational()
        if n is None or k is None or n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= 1000:
            raise TooHard("binomial coefficient")
        return number(comb(int(n), int(k)))

    def absolute(self) -> Value:
        self.bars += 1
        value = self.expression()
        self.take("|")
        self.bars -= 1
        fraction = value.rational()
        return number(abs(fraction)) if fraction is not None else named(f"abs({value.text()})")

    def function(self, name: str) -> Value:
        r"""\sin^2 x, \log_2 8, \ln(3): a name with its argument, a group or the factors up to the next sign."""
        name += self.subscript()
        exponent = None
        if self.peek() == "^":
            self.take()
            exponent = self.exponent()
        if self.peek() in ("(", "{"):
            argument = self.atom()
        else:
            argument = self.factor()
            while self.starts_factor(self.peek()) and self.peek() not in FUNCTIONS:
                argument = argument.times(self.factor(), self.budget)
        value = named(f"{name}({argument.text()})")
        return value if exponent is None else power(value, exponent, self.budget)


def _number(text: str) -> Value:
    """A decimal, exactly; "0.1(6)" has a period, "2.5e3" a power of ten."""
    if len(text) > MAX_DIGITS:
        raise TooHard("number with too many digits")
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 4:
        raise TooHard("number with too many digits")
    if "(" not in mantissa:
        return number(Fraction(mantissa) * Fraction(10) ** int(exponent or 0))
    head, _, period = mantissa.rstrip(")").partition("(")
    decimals = len(head.partition(".")[2])
    repeated = Fraction(int(period), (10 ** len(period) - 1) * 10**decimals)
    return number(Fraction(head if not head.endswith(".") else head[:-1]) + repeated)
