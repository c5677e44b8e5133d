"""Colours of a grid: cividis for sizes, blue to red for signed figures."""

from __future__ import annotations

from collections.abc import Sequence

Colour = tuple[int, int, int]

# Every sixteenth (eighth) of Matplotlib's cividis (RdBu, turned round); straight lines in between.
_CIVIDIS: Sequence[Colour] = (
    *((0, 34, 78), (0, 46, 106), (26, 56, 111), (50, 67, 109), (67, 78, 108), (83, 90, 109)),
    *((97, 101, 111), (111, 112, 115), (125, 124, 120), (140, 136, 120), (155, 148, 118), (171, 160, 114)),
    *((188, 174, 108), (205, 187, 99), (222, 201, 88), (240, 216, 70), (254, 232, 56)),
)
_DIVERGING: Sequence[Colour] = (
    *((5, 48, 97), (42, 113, 178), (107, 172, 209), (194, 221, 236), (247, 246, 246)),
    *((251, 204, 180), (228, 128, 102), (186, 40, 50), (103, 0, 31)),
)


def cividis(share: float) -> Colour:
    """Return the colour at a share of the range, dark for 0 and light for 1."""
    return _between(_CIVIDIS, share)


def diverging(share: float) -> Colour:
    """Return blue for 0, white for a half, red for 1."""
    return _between(_DIVERGING, share)


def _between(stops: Sequence[Colour], share: float) -> Colour:
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - low)) for a, b in zip(stops[low], stops[low + 1], strict=True)
    )
    return (red, green, blue)
