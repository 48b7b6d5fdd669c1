"""Exact values: quotients of sums of terms over the rationals, compared by cross multiplication.

    value  = sum / sum
    sum    = {monomial: rational}
    monomial = product of base ** exponent
    base   = a prime under a root (exponent between 0 and 1), or a name: pi, e, i, infinity, a variable, or a function
             with its arguments, such as log(3)

So 1/sqrt(2) is sqrt(2)/2, and (x + 1)^2 is x^2 + 2x + 1. Names are taken as independent of each other: what compares
equal is equal, while an identity between names (sin^2 + cos^2 = 1) isn't seen. Work and the size of numbers are bounded
by a `Budget`; what exceeds it raises TooHard, it is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import TypeAlias

__all__ = ["Budget", "TooHard", "Value", "named", "number", "power", "root"]

#: (0, prime) or (1, name), so that monomials can be sorted.
Base: TypeAlias = tuple[int, int] | tuple[int, str]
Monomial: TypeAlias = tuple[tuple[Base, Fraction], ...]
Sum: TypeAlias = dict[Monomial, Fraction]

MAX_BITS = 2048  # of a numerator or denominator
MAX_POWER = 512
_ONE: Monomial = ()
_I: Base = (1, "i")


class TooHard(ValueError):
    """The expression is out of bounds, or has no value that could be compared."""


class Budget:
    """Elementary steps that one comparison may take, each of them bounded in time by MAX_BITS."""

    __slots__ = ("left",)

    def __init__(self, steps: int = 20_000) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        """Raises TooHard when the budget is used up."""
        self.left -= steps
        if self.left < 0:
            raise TooHard("too many steps")


@dataclass(frozen=True, slots=True)
class Value:
    """`top` / `bottom`; `bottom` is 1 unless it has several terms. Made by `number`, `named` and arithmetic."""

    top: Sum
    bottom: Sum

    def plus(self, other: Value, budget: Budget) -> Value:
        if self.bottom == other.bottom:
            return _value(_add(self.top, other.top, budget), self.bottom, budget)
        left, right = _times(self.top, other.bottom, budget), _times(other.top, self.bottom, budget)
        return _value(_add(left, right, budget), _times(self.bottom, other.bottom, budget), budget)

    def times(self, other: Value, budget: Budget) -> Value:
        return _value(_times(self.top, other.top, budget), _times(self.bottom, other.bottom, budget), budget)

    def over(self, other: Value, budget: Budget) -> Value:
        """Raises TooHard for a division by zero."""
        return _value(_times(self.top, other.bottom, budget), _times(self.bottom, other.top, budget), budget)

    def minus(self, other: Value, budget: Budget) -> Value:
        return self.plus(other.negative(), budget)

    def negative(self) -> Value:
        return Value({m: -c for m, c in self.top.items()}, self.bottom)

    def equals(self, other: Value, budget: Budget) -> bool:
        return _times(self.top, other.bottom, budget) == _times(other.top, self.bottom, budget)

    def rational(self) -> Fraction | None:
        """The value as a fraction, or None when it isn't rational."""
        if self.bottom != {_ONE: Fraction(1)} or not self.top.keys() <= {_ONE}:
            return None
        return self.top.get(_ONE, Fraction(0))

    def name(self) -> str | None:
        """The name that the value is, such as a variable, or None."""
        if self.bottom == {_ONE: Fraction(1)} and len(self.top) == 1:
            (monomial, coefficient), *_ = self.top.items()
            if coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1 and isinstance(monomial[0][0][1], str):
                return monomial[0][0][1]
        return None

    def text(self) -> str:
        """The same text for the same sums; used inside names."""
        return _text(self.top) if self.bottom == {_ONE: Fraction(1)} else f"({_text(self.top)})/({_text(self.bottom)})"


def number(value: Fraction | int) -> Value:
    """A rational. Raises TooHard beyond MAX_BITS."""
    fraction = _checked(Fraction(value))
    return Value({_ONE: fraction} if fraction else {}, {_ONE: Fraction(1)})


def named(name: str) -> Value:
    """A constant, a variable, or a function with its arguments in the name; "i" squares to -1."""
    return Value({(((1, name), Fraction(1)),): Fraction(1)}, {_ONE: Fraction(1)})


def power(base: Value, exponent: Value, budget: Budget) -> Value:
    """base ** exponent: exact for whole exponents up to MAX_POWER and for roots of rationals, else a name of its own.

    Raises TooHard for 0 ** 0, for zero to a negative power and for results beyond the bounds.
    """
    wanted = exponent.rational()
    if wanted is None:
        # a ** (n + r) is a ** n times a ** r for a whole n: 2 ** (k + 1) is seen as 2 * 2 ** k.
        whole = exponent.top.get(_ONE, Fraction(0)) if exponent.bottom == {_ONE: 1} else Fraction(0)
        if not whole or whole.denominator != 1 or not base.top:
            return named(f"pow({base.text()};{exponent.text()})")
        rest = exponent.minus(number(whole), budget)
        return power(base, number(whole), budget).times(power(base, rest, budget), budget)
    if wanted.denominator != 1:
        if wanted.denominator > MAX_POWER:
            raise TooHard("root of a high order")
        return power(root(base, wanted.denominator, budget), number(wanted.numerator), budget)
    times = wanted.numerator
    if abs(times) > MAX_POWER:
        raise TooHard("high power")
    if not base.top and times <= 0:
        raise TooHard("zero to a power that isn't positive")
    result, square = number(1), base
    left = abs(times)
    while left:
        if left & 1:
            result = result.times(square, budget)
        left >>= 1
        if left:
            square = square.times(square, budget)
    return number(1).over(result, budget) if times < 0 else result


def root(value: Value, order: int, budget: Budget) -> Value:
    """The principal root; a name of its own where that isn't a root of a rational, of pi, of e or of one variable."""
    if not 1 <= order <= MAX_POWER:
        raise TooHard("root of order out of bounds")
    if order == 1:
        return value
    radicand = value.rational()
    if radicand is None:
        name = value.name()
        if name is not None and name != "i" and "(" not in name:
            return Value({(((1, name), Fraction(1, order)),): Fraction(1)}, {_ONE: Fraction(1)})
        return named(f"root({order};{value.text()})")
    if radicand < 0:
        if order == 2:
            return root(number(-radicand), 2, budget).times(named("i"), budget)
        if order % 2 == 0:
            return named(f"root({order};{value.text()})")
        return root(number(-radicand), order, budget).negative()
    if radicand == 0:
        return value
    exponents: dict[Base, Fraction] = {}
    for sign, n in ((1, radicand.numerator), (-1, radicand.denominator)):
        for prime, count in _factors(n, budget):
            exponents[(0, prime)] = exponents.get((0, prime), Fraction(0)) + Fraction(sign * count, order)
    return Value(_term(exponents, Fraction(1)), {_ONE: Fraction(1)})


# --------------------------------------------------------------------------------------------- sums


def _value(top: Sum, bottom: Sum, budget: Budget) -> Value:
    """Divide a bottom of one term into the top."""
    if not bottom:
        raise TooHard("division by zero")
    if len(bottom) > 1:
        return Value(top, bottom) if top else number(0)
    ((monomial, coefficient),) = bottom.items()
    if monomial == _ONE and coefficient == 1:
        return Value(top, bottom)
    inverse = _term({base: -exponent for base, exponent in monomial}, 1 / coefficient)
    return Value(_times(top, inverse, budget), {_ONE: Fraction(1)})


def _add(a: Sum, b: Sum, budget: Budget) -> Sum:
    budget.spend(len(a) + len(b))
    result = dict(a)
    for monomial, coefficient in b.items():
        _put(result, monomial, coefficient)
    return result


def _times(a: Sum, b: Sum, budget: Budget) -> Sum:
    if a == {_ONE: 1}:
        return b
    if b == {_ONE: 1}:
        return a
    budget.spend(4 * len(a) * len(b))
    result: Sum = {}
    for m1, c1 in a.items():
        for m2, c2 in b.items():
            if not m1 or not m2:
                _put(result, m1 or m2, c1 * c2)
                continue
            budget.spend(len(m1) + len(m2))
            exponents = dict(m1)
            for base, exponent in m2:
                exponents[base] = exponents.get(base, Fraction(0)) + exponent
            for monomial, coefficient in _term(exponents, c1 * c2).items():
                _put(result, monomial, coefficient)
    return result


def _put(result: Sum, monomial: Monomial, coefficient: Fraction) -> None:
    total = _checked(result.get(monomial, Fraction(0)) + coefficient)
    if total:
        result[monomial] = total
    else:
        result.pop(monomial, None)


def _term(exponents: dict[Base, Fraction], coefficient: Fraction) -> Sum:
    """One term in its only form: whole powers of primes and of i go into the coefficient."""
    kept: list[tuple[Base, Fraction]] = []
    for base, exponent in exponents.items():
        if base == _I:
            turns = int(exponent) % 4  # i has whole exponents only
            coefficient = -coefficient if turns >= 2 else coefficient
            exponent = Fraction(turns % 2)
        elif base[0] == 0:
            whole = exponent.numerator // exponent.denominator
            if abs(whole) * int(base[1]).bit_length() > MAX_BITS:
                raise TooHard("number with too many digits")
            coefficient *= Fraction(int(base[1])) ** whole
            exponent -= whole
        elif abs(exponent) > MAX_POWER:
            raise TooHard("high power")
        if exponent:
            kept.append((base, exponent))
    return {tuple(sorted(kept)): _checked(coefficient)}


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooHard("number with too many digits")
    return value


def _text(total: Sum) -> str:
    terms = sorted((tuple((str(base[1]), str(e)) for base, e in m), str(c)) for m, c in total.items())
    return "+".join("*".join([c, *(f"{base}^{e}" for base, e in m)]) for m, c in terms) or "0"


# --------------------------------------------------------------------------------------------- factors


def _primes(limit: int) -> tuple[int, ...]:
    sieve = bytearray([1]) * limit
    for n in range(2, isqrt(limit) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, limit, n)))
    return tuple(n for n in range(2, limit) if sieve[n])


_PRIMES = _primes(1000)


def _factors(n: int, budget: Budget) -> Iterable[tuple[int, int]]:
    """(factor, count) of n > 0. What is left after the small primes counts as prime, or as a perfect power of one.

    A square factor with a prime beyond 1000 can stay hidden: then two writings of one root may not be seen as equal.
    """
    budget.spend(len(_PRIMES))
    found = []
    for prime in _PRIMES:
        if prime * prime > n:
            break
        count = 0
        while n % prime == 0:
            n //= prime
            count += 1
        if count:
            found.append((prime, count))
    if n > 1:
        found.append(_perfect_power(n))
    return found


def _perfect_power(n: int) -> tuple[int, int]:
    """(b, k) with b ** k == n and the largest k up to 7; n has no factor below 1000 unless it is prime."""
    for k in (7, 6, 5, 4, 3, 2):
        low = _whole_root(n, k)
        if low**k == n:
            return low, k
    return n, 1


def _whole_root(n: int, k: int) -> int:
    if k == 2:
        return isqrt(n)
    low, high = 1, 1 << (n.bit_length() // k + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**k <= n:
            low = middle
        else:
            high = middle - 1
    return low
