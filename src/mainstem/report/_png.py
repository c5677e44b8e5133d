"""Small pictures of pixels as PNG."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

Pixel = tuple[int, int, int, int]


def png(rows: Sequence[Sequence[Pixel]]) -> bytes:
    """Return rows of red, green, blue and opacity, 0 to 255, the uppermost first, as a PNG file."""
    raw = b"".join(b"\0" + bytes(part for pixel in row for part in pixel) for row in rows)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def data_url(rows: Sequence[Sequence[Pixel]]) -> str:
    """Return the picture as a ``data:`` address."""
    return f"data:image/png;base64,{base64.b64encode(png(rows)).decode('ascii')}"
