"""The units of answers: two quantities with different units are different, also if their numbers are equal."""

from __future__ import annotations

import re

NAMES = (
    "mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|ft foot feet|"
    "yd yard|mi mile|ms millisecond|s sec second|min minute|h hr hour|day|week|month|year|mg milligram|g gram|"
    "kg kilogram|oz ounce|lb pound|ton tonne|ml milliliter millilitre|l liter litre|gallon|quart|pint|cup|"
    "cent|dollar|euro|degree|radian|mph|km/h|m/s"
)
"""The names of each unit, in the singular and lower case."""

UNITS = {name: names.split()[0] for names in NAMES.split("|") for name in names.split()}

LAST = re.compile(
    r"[\d})]\s*(?:~|\\[ ,;])*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*~?)?\s*([a-zA-Z][a-zA-Z/]*)\.?\s*\}?$"
)
"""The last word behind a number."""


def same_units(one: str, other: str) -> bool:
    r"""Return whether two answers have the same unit, or one of them has none that is known.

    >>> same_units("10 m", "10 km"), same_units("10 cm", r"10 \text{ centimeters}"), same_units("10 m", "10")
    (False, True, True)
    """
    units = {unit for each in (one, other) if (unit := _unit_of(each))}
    return len(units) < 2  # noqa: PLR2004 (each has at most one)


def _unit_of(answer: str) -> str | None:
    found = LAST.search(answer.strip().strip("$"))
    name = found[1].lower() if found else ""
    return UNITS.get(name) or UNITS.get(name.removesuffix("s"))
