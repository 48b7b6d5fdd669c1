"""Tables of notation: signs, commands and words that mean the same, or mean nothing."""

from __future__ import annotations

__all__ = ["ALIASES", "FUNCTIONS", "GREEK", "SHORT_WORDS", "SILENT", "SUPERSCRIPTS", "SYMBOLS", "UNITS", "WORDS"]

#: Characters and what they stand for.
SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "⁄": "/", "∕": "/", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
#: Commands that only change how something looks.
SILENT = frozenset(
    [
        r"\left", r"\right", r"\,", r"\!", r"\;", r"\:", r"\>", "\\ ", "~", r"\quad", r"\qquad", r"\displaystyle",
        r"\textstyle", r"\limits", r"\big", r"\Big", r"\bigg", r"\Bigg", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr",
        r"\mathrm", r"\mathbf", r"\mathit", r"\mathsf", r"\boldsymbol", r"\operatorname", r"\rm", r"\bf",
    ]
)  # fmt: skip
ALIASES = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\cdot": "*", r"\times": "*", r"\ast": "*", r"\div": "/", "**": "^", r"\leq": r"\le", r"\leqslant": r"\le",
    r"\geq": r"\ge", r"\geqslant": r"\ge", r"\neq": r"\ne", "<=": r"\le", ">=": r"\ge", "!=": r"\ne", r"\lt": "<",
    r"\gt": ">", "==": "=", r"\varnothing": r"\emptyset", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[",
    r"\rbrack": "]", r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\mid": "|", r"\colon": ":", r"\arcsin": r"\asin",
    r"\arccos": r"\acos", r"\arctan": r"\atan", r"\lg": r"\log",
}  # fmt: skip
FUNCTIONS = frozenset(
    [
        r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc", r"\asin", r"\acos", r"\atan", r"\sinh", r"\cosh",
        r"\tanh", r"\log", r"\ln", r"\exp", r"\gcd", r"\lcm", r"\min", r"\max", r"\det", r"\arg",
    ]
)  # fmt: skip
#: Words of plain text that stand for a command.
WORDS = {name[1:]: name for name in FUNCTIONS} | {
    "sqrt": r"\sqrt", "pi": r"\pi", "infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "and": ",", "or": ",",
    "arcsin": r"\asin", "arccos": r"\acos", "arctan": r"\atan",
}  # fmt: skip
#: English words of two letters, which are no products of two variables.
SHORT_WORDS = frozenset(
    [
        "am", "an", "as", "at", "be", "by", "do", "go", "he", "if", "in", "is", "it", "me", "my", "no", "of", "oh",
        "ok", "on", "so", "to", "up", "us", "we",
    ]
)  # fmt: skip
GREEK = frozenset(
    [
        r"\alpha", r"\beta", r"\gamma", r"\delta", r"\epsilon", r"\varepsilon", r"\zeta", r"\eta", r"\theta",
        r"\vartheta", r"\iota", r"\kappa", r"\lambda", r"\mu", r"\nu", r"\xi", r"\rho", r"\sigma", r"\tau", r"\phi",
        r"\varphi", r"\chi", r"\psi", r"\omega", r"\Gamma", r"\Delta", r"\Theta", r"\Lambda", r"\Xi", r"\Sigma",
        r"\Phi", r"\Psi", r"\Omega", r"\ell",
    ]
)  # fmt: skip
_UNIT_NAMES = {
    "millimeter": "mm millimeter millimeters millimetre millimetres",
    "centimeter": "cm centimeter centimeters centimetre centimetres", "meter": "meter meters metre metres",
    "kilometer": "km kilometer kilometers kilometre kilometres", "inch": "inch inches", "foot": "ft foot feet",
    "yard": "yd yard yards", "mile": "mi mile miles", "gram": "gram grams", "kilogram": "kg kilogram kilograms",
    "milligram": "mg milligram milligrams", "pound": "lb lbs pound pounds", "ounce": "oz ounce ounces",
    "liter": "liter liters litre litres", "milliliter": "ml mL milliliter milliliters",
    "second": "sec secs second seconds", "minute": "min mins minute minutes", "hour": "hr hrs hour hours",
    "day": "day days", "week": "week weeks", "month": "month months", "year": "yr yrs year years",
    "dollar": "dollar dollars USD usd", "cent": "cent cents", "euro": "euro euros",
    "degree": "deg degs degree degrees", "radian": "rad radian radians", "percent": "percent",
    "unit": "unit units", "mph": "mph", "km/h": "km/h kph kmh", "m/s": "m/s", "joule": "joule joules",
    "newton": "newton newtons", "watt": "watt watts", "volt": "volt volts", "hertz": "Hz hertz",
    "gallon": "gallon gallons", "point": "point points", "way": "way ways", "student": "student students",
    "person": "person people", "time": "time times",
}  # fmt: skip
#: Words of units, each with the name that its unit has here. One letter is a variable, unless it is set as text.
UNITS = {word: unit for unit, words in _UNIT_NAMES.items() for word in words.split()}
