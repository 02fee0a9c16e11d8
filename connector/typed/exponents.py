"""Numbers that Spark takes minutes to round to a column of type decimal, such as ``1e400000000``: it writes
out all their digits.

They are found in the text, wherever they stand in it, even in names and in columns of text. So the text is
first parsed with other numbers in their places, which no decimal takes, and quickly: if its decimals are
still read, none of them is such a number.
Not here: what is said of a body that does not fit (``formats.py``).
Invariant: a body without such a number is parsed as it is, and only once.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as F

# an exponent of four digits; Java's BigDecimal takes the digits of all alphabets
_EXPONENT = r"[\p{Nd}.][eE][+-]?\p{Nd}{4,}"
_LARGER = "1e2999"  # the number before it has at most a thousand digits
# in quotes it may be escaped, grouped, and of any length; 300 characters are enough
_ESCAPED, _SIGN = r"\\u(?!00[46]5)[0-9a-fA-F]{4}", r"[.,+-]"
_QUOTED = (
    rf"""(["'])(?:(?:\p{{Nd}}|{_SIGN}|{_ESCAPED}){{300}}"""
    rf"""|(?:\p{{Nd}}|{_SIGN}|{_ESCAPED}){{1,300}}+(?:[eE]|\\u00[46]5)(?:{_SIGN}*+(?:\p{{Nd}}|{_ESCAPED})){{4}})"""
)
_NO_NUMBER = "$1e"  # behind its quote
# what most texts do not have, and is found in a fifth of the time
_LIKELY, _LONG, _LONG_QUOTED = (
    r"""[eE\\](?!["'a-tv-zA-Z ])[^"A-Za-tv-z]{4}""",
    300,
    r"""["'][^"'g-tv-zG-Z ]{300}""",
)


def harmless(text: Column, is_broken: Callable[[Column], Column], *, grouped: bool = False) -> Column:
    """``text``, or one that is broken too, if it has such a number as a decimal. ``is_broken`` parses its
    decimals. ``grouped``: a number may have commas without quotes.
    """
    bare = F.regexp_replace(text, ",", "") if grouped else text
    replaced = F.regexp_replace(F.regexp_replace(bare, _EXPONENT, _LARGER), _QUOTED, _NO_NUMBER)
    likely = bare.rlike(_LIKELY) | ((F.length(bare) > _LONG) & bare.rlike(_LONG_QUOTED))
    has_one = likely & bare.rlike(f"{_EXPONENT}|{_QUOTED}")
    return F.when(has_one & is_broken(replaced), replaced).otherwise(text)
