r"""The forms of an answer: a formula, marked or bare, a number within a sentence, or words; as math-verify reads each.

math-verify reads formulas where dollar signs or `\boxed{}` mark them, and of other text the numbers only: of a bare
`3\sqrt{13}` it reads 3. So what is a formula is marked first. It reads words as products of letters, for which `east`
equals `seat`: words are compared as words. Knows no process and does not import math-verify.
"""

from __future__ import annotations

import re

MARKED = re.compile(r"\\boxed|\\\(|\\\[|\$\$|(?<!\\)\$[^$]+(?<!\\)\$")
"""A formula that is marked already."""

FINAL = "####"
"""The answer of GSM8K follows it."""

SYMBOLS = "pi|inf|infinity|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|mod|or|and|alpha|beta|gamma|theta|lambda|phi"
"""What is part of a formula although it has several letters."""

WORD = rf"(?!(?:{SYMBOLS})\b)[^\W\d_]{{2,}}"
"""A word of prose."""

SENTENCE = re.compile(rf"(?<![\\\w]){WORD}(?:\s*:|\W+(?:\w+\W+)??{WORD}\b)")
"""Prose: two words, or one before a colon."""

UNITS = re.compile(rf"(?<=[\d}})])(?:\s+{WORD}\b[.,]?)+$")
"""Words behind a quantity: `10 square meters`."""

WORDS = re.compile(r"[^\W\d_][^\W\d_ ,.'’!-]*(?:[ ,.'’!-]+[^\W\d_]*)*")
"""An answer of words alone."""

TIME = re.compile(r"\d{1,2}(?::\d\d)?\s*[ap]\.?\s?m\b\.?", re.IGNORECASE)
"""A time of day, `6:00 PM`, which is no ratio."""

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
"""Words within a formula."""

BARE_LATEX = re.compile(r"[^\s$]*\\[a-zA-Z]+(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|[^\s${}])*")
"""A formula in LaTeX within a sentence, without spaces outside its braces."""

SCIENTIFIC = re.compile(r"(?<![\w.\\])(-?\d+(?:\.\d+)?)[eE]\+?(-?\d+)(?![\w.])")
"""A number as programs write it, `1e-07`: the letter is no Euler's number."""

ROOT = re.compile(r"√\s*(\d+|\w|\([^()]*\))")


def formulas_of(answer: str) -> tuple[str, ...]:
    """Return `answer`, from the data, as texts whose last formula or number is the answer: with its unit, and without.

    math-verify knows the usual units only; an answer of `3 apples` is also the number.
    """
    final = in_latex(answer.rpartition(FINAL)[2].strip())
    if MARKED.search(final):
        return (final,)
    quantity = UNITS.sub("", final)
    if SENTENCE.search(quantity):
        return (with_marks(final),)
    return tuple(dict.fromkeys((f"${final}$", f"${quantity}$")))


def with_marks(text: str) -> str:
    """Return `text` with formulas in bare LaTeX marked, if it marks none: their numbers are no answers of their own."""
    if MARKED.search(text):
        return text
    return BARE_LATEX.sub(lambda found: _marked(found.group()), text)


def in_latex(text: str) -> str:
    """Return `text` with numbers of programs, roots and minus signs as LaTeX has them."""
    plain = text.replace("\N{MINUS SIGN}", "-")
    return SCIENTIFIC.sub(r"\1 \\times 10^{\2}", ROOT.sub(r"\\sqrt{\1}", plain))


def words_of(answer: str) -> str | None:
    """Return the letters and digits of an `answer` that is words or a time of day; None for any other."""
    final = answer.rpartition(FINAL)[2].strip().strip("$")
    text = TEXT.sub(r"\1", final)
    if TIME.fullmatch(text):
        return letters_of(text)
    longest = max((len(word) for word in re.findall(WORD, text)), default=0)
    is_words = WORDS.fullmatch(text) is not None and longest >= (2 if text != final else 3)
    return letters_of(text) if is_words else None


def letters_of(text: str) -> str:
    """Return the letters and digits of `text`, in lower case, for a comparison of words."""
    return "".join(filter(str.isalnum, TEXT.sub(r"\1", text).casefold()))


def _marked(formula: str) -> str:
    core = formula.rstrip(".,;:!?")
    return f"${core}${formula[len(core) :]}"
