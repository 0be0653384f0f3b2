r"""The notation of an answer: Unicode, the text of programs and shorthands, each as the LaTeX that math-verify reads.

It reads only the beginning of other notations: of `3×10⁸` the 3, of `0.\overline{3}` the 0. So these are written in
LaTeX first. Knows no form of an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction

NUMBER = r"(?<![\w.,\\])(\d+(?:\.\d+)?)"

SCIENTIFIC = re.compile(
    rf"{NUMBER}(?:[eE]\+?(-?\d+)|\s*(?:×|\\times|\\cdot|[*·⋅])\s*10\s*\^\s*\{{?(-?\d+)\}}?)(?![\w.])"
)
r"""A number as programs write it, `1e-07`, where the letter is no Euler's number, or in steps: `6 \times 10^{23}`."""

SUPERSCRIPTS = re.compile(r"[⁻⁺⁰¹²³⁴-⁹ⁿ]+")
SUBSCRIPTS = re.compile(r"[₀-₉]+")
VULGAR = re.compile(r"[¼-¾⅐-⅞]")
"""A character that is a fraction, such as ½."""

FRACTION = r"(?:\\[dtc]?frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)\s*(\d))|(?<=\s)(\d+)/(\d+))(?!\d|/|\.\d)"
MIXED = re.compile(rf"(?<![\w.,/}}^])(\d+)(?:\s|\\[ ,;])*{FRACTION}")
r"""A whole number and a fraction below 1, `2 1/2` or `2\frac{1}{2}`: their sum."""

BARE_FRACTION = re.compile(r"\\([dtc]?frac|binom)\s*(\d)\s*(\d)")
REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
ELLIPSIS = re.compile(r"(?<![\w.])(\d*)\.(\d*?)(\d{1,6}?)\3{2,}(?:\.\.\.|…|\\[lc]?dots)")
"""Decimals that repeat without end, marked by a line or dots."""

GAP = r"(?:\{,\}|,?\\[,!;: ]\s*|[~\u00a0\u2009\u202f])"
THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{GAP}\d{{3}})+(?!\d)")
SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
"""A whole answer such as `1 000 000`; elsewhere these may be several numbers."""

LETTERS = {"π": r"\pi", "∞": r"\infty", "θ": r"\theta", "α": r"\alpha", "β": r"\beta", "λ": r"\lambda", "φ": r"\phi"}
OPERATORS = {
    "∪": r"\cup", "∩": r"\cap", "∅": r"\emptyset", "∈": r"\in", "≤": r"\le", "≥": r"\ge", "≠": r"\ne",
    "±": r"\pm", "×": r"\times", "·": r"\cdot", "⋅": r"\cdot", "÷": r"\div", "≈": r"\approx", "°": r"^\circ",
    "ℝ": r"\mathbb{R}", r"\varnothing": r"\emptyset", r"\langle": "(", r"\rangle": ")", "**": "^",
    r"^{\circ}": r"^\circ",
}  # fmt: skip

CONSTANTS = {"infinity": "infty", "inf": "infty"}
NAME = re.compile(r"(?<![a-zA-Z\\{])(pi|infinity|inf|infty|theta|alpha|beta|gamma|lambda|phi)(?![a-zA-Z}])")
FUNCTION = re.compile(r"(?<![a-zA-Z\\])(sin|cos|tan|cot|sec|csc|log|ln|exp)(?=\s*[(_])")
SUBSCRIPT_OF_LOG = re.compile(r"\\log_(\d+)")
ROOT = re.compile(r"√\s*(\d+|\w|\([^()]*\))")
SQRT = re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)")
POWER = re.compile(r"\^(-\d+|\d{2,})")
CHOOSE = re.compile(r"(\d+) choose (\d+)")
LETTER = re.compile(r"\\(?:mathbf|boldsymbol|vec|hat)\s*(?:\{(\w)\}|(\w))")
UNION = re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])")
PERCENT = re.compile(r"(?<!\\)%")
CURRENCY = re.compile(r"(?:[€£¥₹]|\\?\$)\s*(?=[\d.])")
TEMPERATURE = re.compile(r"\s*(?:°|\^\{?\\circ\}?)\s*(?:\\(?:text|mathrm)\s*\{\s*[CF]\s*\}|[CF]\b)")
"""A unit, as the degrees of an angle are."""

SCALE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALED = re.compile(rf"(\d+(?:\.\d+)?)\s*(?:\\text\s*\{{\s*)?({'|'.join(SCALE)})\b(?:\s*([^{{}}]*)\}})?")

ROWS = re.compile(r"\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]")
"""Lists of numbers in a list, a matrix."""


def in_latex(text: str) -> str:
    """Return `text` with its numbers, powers, fractions and Greek letters as LaTeX has them; its prose is unchanged."""
    plain = text.replace("\N{MINUS SIGN}", "-")
    plain = SUPERSCRIPTS.sub(
        lambda found: f"^{{{unicodedata.normalize('NFKC', found.group())}}}".replace("−", "-"), plain
    )
    plain = SUBSCRIPTS.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found.group())}}}", plain)
    plain = THOUSANDS.sub(lambda found: re.sub(r"\D", "", found.group()), plain)
    plain = SCIENTIFIC.sub(_in_steps, SCALED.sub(_scaled, plain))
    plain = MIXED.sub(_summed, VULGAR.sub(_vulgar, ROOT.sub(r"\\sqrt{\1}", plain)))
    plain = ELLIPSIS.sub(_repeated, REPEATING.sub(_repeated, BARE_FRACTION.sub(r"\\\1{\2}{\3}", plain)))
    return _replaced(plain, LETTERS)


def as_formula(text: str) -> str:
    """Return `text`, a formula without prose, as LaTeX has it."""
    plain = text.strip()
    plain = plain.replace(" ", "") if SPACED.fullmatch(plain) else plain
    plain = CURRENCY.sub("", in_latex(plain))
    plain = PERCENT.sub(r"\\%", UNION.sub(r"\\cup ", plain))
    plain = _replaced(TEMPERATURE.sub(r"^\\circ", plain), OPERATORS)
    plain = SQRT.sub(r"\\sqrt{\1}", LETTER.sub(r"\1\2", CHOOSE.sub(r"\\binom{\1}{\2}", plain)))
    plain = POWER.sub(r"^{\1}", ROWS.sub(_matrix, plain))
    plain = SUBSCRIPT_OF_LOG.sub(r"\\log_{\1}", FUNCTION.sub(r"\\\1", plain))
    return NAME.sub(lambda found: f"\\{CONSTANTS.get(found.group(), found.group())} ", plain).strip()


def _replaced(text: str, table: Mapping[str, str]) -> str:
    """Return `text` with the keys of `table` replaced; a command is apart from a letter after it."""
    for old, new in table.items():
        first, *parts = text.split(old)
        text = first + "".join(_apart(new, part) for part in parts)
    return text


def _apart(command: str, following: str) -> str:
    return f"{command} {following}" if following[:1].isalpha() and command[-1].isalpha() else f"{command}{following}"


def _in_steps(found: re.Match[str]) -> str:
    mantissa, exponent, power = found.groups()
    return rf"{mantissa}\times10^{{{exponent or power}}}"


def _vulgar(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found.group()).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}"


def _summed(found: re.Match[str]) -> str:
    whole, *parts = found.groups()
    above, below = (int(part) for part in parts if part is not None)
    return rf"\frac{{{int(whole) * below + above}}}{{{below}}}" if 0 < above < below else found.group()


def _repeated(found: re.Match[str]) -> str:
    whole, fixed, again = found.groups()
    value = int(f"{whole}{fixed}{again}") - int(f"{whole}{fixed}" or 0)
    fraction = Fraction(value, 10 ** len(fixed) * (10 ** len(again) - 1))
    return rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}"


def _scaled(found: re.Match[str]) -> str:
    number, scale, rest = found.groups()
    unit = rf" \text{{{rest}}}" if rest else ""
    return rf"{number}\times10^{{{SCALE[scale]}}}{unit}"


def _matrix(found: re.Match[str]) -> str:
    rows = re.findall(r"\[([^\[\]]*)\]", found.group(1))
    lines = r"\\".join(row.replace(",", "&") for row in rows)
    return rf"\begin{{bmatrix}}{lines}\end{{bmatrix}}"
