"""A text from a string, a file, a folder or a dataset, read in pieces."""

from __future__ import annotations

import dataclasses
import hashlib
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from mainstem.errors import SourceError

from ._datasets import dataset_rows
from ._files import files_of_folder, read_utf8
from ._packaged import PACKAGED_TEXTS

TextKind = Literal["auto", "literal", "path", "dataset", "packaged"]

_PREFIXES: dict[str, TextKind] = {"text:": "literal", "dataset:": "dataset"}
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_SUFFIX = re.compile(r"\.[A-Za-z]\w{0,7}$")
_LONGEST_NAME = 255  # characters, of a file's name on every common file system
_HOW_LITERAL = "To pass the words themselves, write text:WORDS, or kind='literal' in Python."
_HASH_WHOLE_BYTES = 1 << 30  # above this only the part that was read is hashed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSource:
    """A text that can be read again and again, in pieces.

    Attributes:
        kind: ``"literal"``, ``"file"``, ``"folder"`` or ``"dataset"``.
        name: what it was asked for by; ``"literal"`` for words given directly.
        documents: opens the text anew: its documents, each in pieces of str.
        separator: what joins two documents; part of the text.
        num_bytes: size on disk or as UTF-8; None where only reading it all would tell.
        provenance: JSON-ready facts about the source.
    """

    kind: Literal["literal", "file", "folder", "dataset"]
    name: str
    documents: Callable[[], Iterable[Iterable[str]]] = dataclasses.field(repr=False)
    separator: str = ""
    num_bytes: int | None = None
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def chunks(self) -> Iterator[str]:
        """Pieces whose concatenation is the text: the documents, joined by the separator.

        Raises:
            SourceError: bytes that are no UTF-8, or a file that has gone.
        """
        for number, document in enumerate(self.documents()):
            if number and self.separator:
                yield self.separator
            yield from document

    def read(self) -> str:
        """The whole text."""
        return "".join(self.chunks())

    def sha256(self) -> str | None:
        """Hex SHA-256 of the whole text as UTF-8; None for a dataset or more than 1 GiB, not read through.

        Of a file without a byte-order mark this is what ``sha256sum`` prints.
        """
        if self.num_bytes is None or self.num_bytes > _HASH_WHOLE_BYTES:
            return None
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk.encode())
        return digest.hexdigest()


def load_text(
    text: str | os.PathLike[str],
    *,
    kind: TextKind = "auto",
    split: str = "train",
    column: str | None = None,
    pattern: str = "**/*",
    separator: str = "\n\n",
    streaming: bool = True,
) -> TextSource:
    """Find the text that ``text`` names. Nothing but its beginning is read yet.

    Args:
        text: one of

            - a file (UTF-8; a byte-order mark is dropped) or a folder (its files by sorted path, hidden ones
              left out);
            - ``sotu``, the State of the Union addresses of 1946 to 2021, which come with mainstem, and
              ``sotu-held-out``, what of it the twin towers were not trained on;
            - ``NAME`` or ``NAME:CONFIG`` of the library ``datasets``;
            - the words themselves, if they hold white space and do not look like a path (one line with a
              slash or ending like a file name looks like one, and is an error when nothing is there);
            - ``text:WORDS`` and ``dataset:NAME`` say which.
        kind: ``"literal"``, ``"path"``, ``"dataset"`` or ``"packaged"`` take ``text`` as just that;
            ``"auto"`` decides as above.
        split: of a dataset.
        column: of a dataset; default ``"text"``, or the only column of strings.
        pattern: of the files in a folder, as `pathlib.Path.glob` takes it.
        separator: joins the files of a folder and the rows of a dataset.
        streaming: whether a dataset is read row by row from its place instead of being downloaded whole.

    Raises:
        SourceError: nothing of that name, an empty text, bytes that are no UTF-8 (file and byte are named),
            an unknown split or column.
        MissingExtraError: a dataset is asked for and ``datasets`` is not installed.
    """
    name, kind = _classify(text, kind)
    if kind == "literal":
        source = _literal(name)
    elif kind == "packaged":
        source = _packaged(name)
    elif kind == "path":
        source = _path(Path(name).expanduser(), pattern, separator)
    else:
        source = _dataset(name, split, column, separator=separator, streaming=streaming)
    for chunk in source.chunks():
        if chunk.strip():
            return source
    raise SourceError(f"The text is empty: {source.kind} {source.name!r} holds nothing but white space.")


def _classify(text: str | os.PathLike[str], kind: TextKind) -> tuple[str, TextKind]:
    """Decide what the argument is; returns it without its prefix."""
    name = os.fspath(text)
    if kind != "auto":
        return name, kind
    if not isinstance(text, str):
        return name, "path"
    for prefix, meant in _PREFIXES.items():
        if name.startswith(prefix):
            return name.removeprefix(prefix), meant
    if not name.strip():
        raise SourceError("The text is empty: nothing but white space was given.")
    if _exists(name):
        return name, "path"
    if name in PACKAGED_TEXTS:
        return name, "packaged"
    if "\n" in name or ("/" not in name and len(name) > _LONGEST_NAME):
        return name, "literal"
    if _SUFFIX.search(name) or name.startswith(("/", "./", "../", "~")):
        raise SourceError(f"There is no file or folder {name!r}. {_HOW_LITERAL}")
    if _DATASET.fullmatch(name):
        return name, "dataset"
    if "/" in name:
        raise SourceError(f"There is no file or folder {name!r}. {_HOW_LITERAL}")
    return name, "literal"


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long for a name, no such home, a zero byte
        return False


def _literal(words: str) -> TextSource:
    num_bytes = len(words.encode(errors="surrogatepass"))
    try:
        words.encode()
    except UnicodeEncodeError as error:
        raise SourceError(
            f"The text holds a lone surrogate at character {error.start}, which no file can hold."
        ) from error
    return TextSource(
        kind="literal",
        name="literal",
        documents=lambda: [[words]],
        num_bytes=num_bytes,
        provenance={"kind": "literal", "name": "literal"},
    )


def _packaged(name: str) -> TextSource:
    if name not in PACKAGED_TEXTS:
        raise SourceError(f"No text {name!r} comes with mainstem; there is {', '.join(PACKAGED_TEXTS)}.")
    documents = lzma.decompress(PACKAGED_TEXTS[name].read_bytes()).decode().strip().split("\n\n")
    return TextSource(
        kind="file",
        name=name,
        documents=lambda: ([document] for document in documents),
        separator="\n\n",
        num_bytes=sum(len(document.encode()) for document in documents),
        provenance={"kind": "packaged", "name": name, "file": PACKAGED_TEXTS[name].name},
    )


def _path(path: Path, pattern: str, separator: str) -> TextSource:
    if path.is_file():
        return TextSource(
            kind="file",
            name=str(path),
            documents=lambda: [read_utf8(path)],
            num_bytes=path.stat().st_size,
            provenance={"kind": "file", "name": path.name, "path": str(path.resolve())},
        )
    if not path.is_dir():
        raise SourceError(f"There is no file or folder {str(path)!r}. {_HOW_LITERAL}")
    files = files_of_folder(path, pattern)
    return TextSource(
        kind="folder",
        name=str(path),
        documents=lambda: (read_utf8(file) for file in files),
        separator=separator,
        num_bytes=sum(file.stat().st_size for file in files),
        provenance={
            "kind": "folder",
            "name": path.name,
            "path": str(path.resolve()),
            "num_files": len(files),
            "pattern": pattern,
            "separator": separator,
        },
    )


def _dataset(name: str, split: str, column: str | None, *, separator: str, streaming: bool) -> TextSource:
    rows = dataset_rows(name, split=split, column=column, streaming=streaming, hint=_HOW_LITERAL)
    return TextSource(
        kind="dataset",
        name=name,
        documents=lambda: ([document] for document in rows),
        separator=separator,
        provenance={
            "kind": "dataset",
            "name": rows.name,
            "config": rows.config,
            "split": split,
            "column": rows.column,
            "separator": separator,
            **({} if rows.fingerprint is None else {"fingerprint": rows.fingerprint}),
        },
    )
