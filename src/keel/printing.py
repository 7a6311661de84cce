"""Text from outside (names of folders, tags, columns of logs) made safe for a terminal."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters other than tab and newline
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # what reorders or hides text
    "\ud800-\udfff"  # half characters, which cannot be encoded
    "]"
)


def printable(text: str) -> str:
    r"""Return `text` with every character written out that could steer a terminal.

    Newlines and tabs stay as they are.

    Examples:
        >>> print(printable("\x1b[31mred"))
        \x1b[31mred
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
