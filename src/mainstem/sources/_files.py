"""UTF-8 files, read in pieces, with the place of a bad byte."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from mainstem.errors import SourceError

CHUNK_BYTES = 1 << 18


def read_utf8(path: Path, chunk_bytes: int = CHUNK_BYTES) -> Iterator[str]:
    """Yield the file's text in pieces of about ``chunk_bytes``; line ends stay, a byte-order mark goes.

    Raises:
        SourceError: names the file and the first byte that is no UTF-8, or why it cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    fed = 0
    try:
        with path.open("rb") as file:
            while True:
                data = file.read(chunk_bytes)
                pending = len(decoder.getstate()[0])
                try:
                    piece = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    place = fed - pending + error.start
                    byte = error.object[error.start]
                    raise SourceError(
                        f"{path} is not UTF-8: byte {place} is 0x{byte:02x} ({error.reason}). "
                        f"Convert it, for example with: iconv -f LATIN1 -t UTF-8"
                    ) from error
                if fed == 0:
                    piece = piece.removeprefix("\ufeff")
                fed += len(data)
                if piece:
                    yield piece
                if not data:
                    return
    except OSError as error:
        raise SourceError(f"Cannot read {path}: {error.strerror or error}.") from error


def files_of_folder(folder: Path, pattern: str) -> list[Path]:
    """Files that match ``pattern`` by sorted relative path, hidden files and folders left out.

    Raises:
        SourceError: there is none.
    """
    files = [
        path
        for path in folder.glob(pattern)
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise SourceError(f"The folder {folder} has no file that matches {pattern!r}.")
    return sorted(files, key=lambda path: path.relative_to(folder).parts)
