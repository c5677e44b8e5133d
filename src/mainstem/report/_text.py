"""Text that shows what is in it."""

from __future__ import annotations

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """Return text with control, direction and unassigned characters written out, such as ``<U+202E>``.

    Joiners inside emoji stay: without them a family would fall apart into its members.
    """
    return "".join(
        f"<U+{ord(c):04X}>" if c != "\u200d" and unicodedata.category(c) in _HIDDEN else c for c in text
    )
