r"""The forms of an answer: a formula, marked or bare, a number within a sentence, or words; as math-verify reads each.

math-verify reads formulas where dollar signs or `\boxed{}` mark them, and of other text the numbers only: of a bare
`3\sqrt{13}` it reads 3. So formulas are marked first. It reads words as products of letters, so that `east` equals
`seat`: words are compared as words. Knows no process and does not import math-verify.
"""

from __future__ import annotations

import re

from .answer_notation import as_formula, in_latex

MARKED = re.compile(r"\\boxed|\\\(|\\\[|\$\$|(?<!\\)\$[^$]+(?<!\\)\$")
"""A formula that is marked already."""

WHOLE = r"\boxed{"
"""Begins a text that is a formula from its beginning to its end: no answer is searched in its parts."""

SPACED_BOX = re.compile(r"\\boxed\s+\{")
BOXES = (WHOLE, r"\fbox{")

MARKS = re.compile(r"(\$\$?|\\\(|\\\[)(.+?)(\$\$?|\\\)|\\\])", re.DOTALL)
"""A formula with the marks around it."""

AROUND = re.compile(r"\$\$?([^$]+)\$\$?|\\\(((?:(?!\\\)).)+)\\\)")
"""Marks around a whole answer."""

TRAILING = re.compile(r"(?<=[\w})\]])\.$|\s*\\\\$")
"""The full stop of a sentence, or the end of a line."""

FINAL = "####"
"""The answer of GSM8K follows it."""

SYMBOLS = "pi|inf|infinity|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|mod|or|and|alpha|beta|gamma|theta|lambda|phi"
"""Words that are part of a formula although they have several letters."""

WORD = rf"(?!(?:{SYMBOLS})\b)[^\W\d_]{{2,}}"
"""A word of prose."""

SENTENCE = re.compile(rf"(?<![\\\w]){WORD}(?:\s*:|\W+(?:\w+\W+)??{WORD}\b)")
"""Prose: two words, or one before a colon."""

NAMED = r"\s*\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}"
SYMBOL = r"\s*(?:[kcmμn]m|[mμk]g|m[lL]|k?Hz|kW|m|ft|in|yd|mi)(?=[/^])"
POWER = r"(?:\^\{?-?\d\}?)?"
UNITS = re.compile(rf"(?<=[\d}})])(?:(?:~|\\[ ,;])*(?:{NAMED}|\s+{WORD}|{SYMBOL}){POWER}(?:/\w+{POWER})?[.,]?)+$")
"""Units behind a quantity: `10 square meters`, `9.8 m/s^2`."""

WORDS = re.compile(r"[^\W\d_][^\W\d_ ,.'’!-]*(?:[ ,.'’!-]+[^\W\d_]*)*")
"""An answer of words alone."""

TIME = re.compile(r"\d{1,2}(?::\d\d)?\s*[ap]\.?\s?m\b\.?", re.IGNORECASE)
"""A time of day, `6:00 PM`, not a ratio."""

TEXT = re.compile(r"\\(?:text(?:bf|it|rm|tt|sf)?|math(?:rm|bf|sf|tt)|mbox)\s*\{([^{}]*)\}")
"""Words within a formula."""

BARE_LATEX = re.compile(r"[^\s$]*\\[a-zA-Z]+(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|[^\s${}])*")
"""A formula in LaTeX within a sentence, without spaces outside its braces."""

MONTH = r"(?:jan|febr)uary|march|april|may|june|july|august|(?:septem|octo|novem|decem)ber"
DATE = re.compile(
    rf"\d{{4}}-\d{{1,2}}-\d{{1,2}}|\d{{1,2}}/\d{{1,2}}/\d{{2,4}}|\d{{1,2}}(?:st|nd|rd|th)? (?:{MONTH})(?:,? \d{{4}})?"
    rf"|(?:{MONTH}) \d{{1,4}}(?:st|nd|rd|th)?(?:,? \d{{4}})?",
    re.IGNORECASE,
)
"""A day, not a difference, quotient or quantity."""

CLOCK = re.compile(r"\d{1,2}:0\d|\d{1,2}:\d\d:\d\d")
"""A time that is no ratio."""

BASED = re.compile(r"[0-9A-Fa-f]+_\{?\d+\}?|0[xXbBoO][0-9A-Fa-f]+")
"""A number with its base, `101_2` or `0x1F`."""

LABEL = re.compile(
    rf"(?!(?:{SYMBOLS}|about|around|approximately|roughly|nearly|almost)\b)[^\W\d_]{{2,}} \d+", re.IGNORECASE
)
"""A name with a number, `Route 66`."""

SEVERAL_UNITS = re.compile(rf"\d+(?:\.\d+)?\s*{WORD}(?:[ ,]+(?:and )?\d+(?:\.\d+)?\s*{WORD})+")
"""A quantity in several units, `2 hours 30 minutes`."""

CHOICE = re.compile(r"\(?[A-Z][).]?")
"""The letter of a choice, not a number such as Euler's."""

IN_WORDS = (TIME, DATE, CLOCK, BASED, LABEL, SEVERAL_UNITS, CHOICE)
"""Answers that are compared as words although they have digits, or one letter."""

SET = re.compile(r"\\?(?:left)?\s*\\?\{\s*[^(\[\s].*\}", re.DOTALL)
TUPLE = re.compile(r"\\?(?:left)?\s*\(.*,.*\)", re.DOTALL)

ABOUT = re.compile(r"^(?:≈|\\approx|=|about|around|approximately|roughly|nearly|almost)\s*(?=[-+\d.\\])", re.IGNORECASE)
"""Begins an answer without being a part of it."""


def formulas_of(answer: str) -> tuple[str, ...]:
    """Return `answer` as texts that end with it as their last formula or number: with its unit, and without.

    math-verify knows the usual units only; an answer of `3 apples` is also the number.
    """
    final = core_of(answer)
    if MARKED.search(final):
        return (with_marks(final),)
    final = ABOUT.sub("", final)
    quantity = UNITS.sub("", in_latex(final))
    if SENTENCE.search(quantity):
        return (with_marks(final),)
    return tuple(dict.fromkeys(f"{WHOLE}{as_formula(each)}}}" for each in (final, quantity)))


def same_brackets(answer: str, found: str) -> bool:
    """Return whether not one of both is a set and the other a tuple: math-verify compares their elements only."""
    one, other = core_of(answer), core_of(found)
    return not any(SET.fullmatch(a) and TUPLE.fullmatch(b) for a, b in ((one, other), (other, one)))


def core_of(answer: str) -> str:
    """Return `answer` without the text before its last mark, and without the marks around it."""
    final = TRAILING.sub("", answer.rpartition(FINAL)[2].strip())
    if (boxed := box_of(final)) is not None:
        return core_of(boxed)
    marked = AROUND.fullmatch(final)
    return core_of(marked[1] or marked[2]) if marked else final


def box_of(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` of `text`; None if none ends."""
    text = SPACED_BOX.sub(WHOLE.replace("\\", "\\\\"), text)
    start = max(text.rfind(box) + len(box) if box in text else -1 for box in BOXES)
    depth = 1 if start >= 0 else 0
    for end in range(max(start, 0), len(text)) if depth else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        if not depth:
            return text[start:end]
    return None


def with_marks(text: str) -> str:
    """Return `text` with its formulas as LaTeX has them, and with those in bare LaTeX marked if none are.

    The numbers of a formula are no answers of their own.
    """
    if MARKED.search(text):
        return MARKS.sub(lambda found: f"{found[1]}{as_formula(found[2])}{found[3]}", text)
    return BARE_LATEX.sub(lambda found: _marked(found.group()), in_latex(text))


def words_of(answer: str) -> str | None:
    """Return the letters and digits of an `answer` that is words, a day or a time; None for any other."""
    final = core_of(answer)
    text = TEXT.sub(r"\1", final).strip()
    if any(each.fullmatch(text) for each in IN_WORDS):
        return letters_of(text)
    longest = max((len(word) for word in re.findall(r"[^\W\d_]+", text) if re.fullmatch(WORD, word)), default=0)
    is_words = WORDS.fullmatch(text) is not None and longest >= (2 if text != final else 3)
    return letters_of(text) if is_words else None


def letters_of(text: str) -> str:
    """Return the letters and digits of `text`, in lower case, for a comparison of words; signs within digits stay."""
    plain = re.sub(r"[{}^$]|\band\b", "", TEXT.sub(r"\1", text)).casefold()
    return "".join(each for place, each in enumerate(plain) if each.isalnum() or _within_digits(plain, place))


def _within_digits(text: str, place: int) -> bool:
    return text[place] in ":/_.-" and text[place - 1 : place].isalnum() and text[place + 1 : place + 2].isdigit()


def _marked(formula: str) -> str:
    core = formula.rstrip(".,;:!?")
    return f"${core}${formula[len(core) :]}"
