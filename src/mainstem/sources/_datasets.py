"""Rows of text from the library ``datasets``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mainstem.errors import SourceError

from ._extras import quiet_datasets, quiet_hub, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetRows:
    """The strings of one column; iterating starts from the first row each time.

    Attributes:
        name, config, column: as resolved.
        data: the ``datasets`` object.
    """

    name: str
    config: str | None
    column: str
    data: Any = dataclasses.field(repr=False)

    @property
    def fingerprint(self) -> str | None:
        """What ``datasets`` tells one content from another by; None for a stream, of which nobody knows."""
        return getattr(self.data, "_fingerprint", None)

    def __iter__(self) -> Iterator[str]:
        """Yield the column's strings; rows of None are passed over."""
        for row in self.data:
            value = row[self.column]
            if value is None:
                continue
            if not isinstance(value, str):
                raise SourceError(
                    f"Column {self.column!r} of {self.name!r} holds {type(value).__name__}, no strings. "
                    f"Choose another column: {', '.join(map(str, row))}."
                )
            yield value


def dataset_rows(name: str, *, split: str, column: str | None, streaming: bool, hint: str) -> DatasetRows:
    """Open ``NAME`` or ``NAME:CONFIG``.

    Raises:
        SourceError: no such dataset, split or column; ``hint`` ends the first of these.
        MissingExtraError: ``datasets`` is not installed.
    """
    datasets = require("datasets", feature="Reading a dataset")
    path, _, config = name.partition(":")
    try:
        with quiet_datasets(), quiet_hub():
            data = datasets.load_dataset(path, config or None, split=split, streaming=streaming)
    except Exception as error:  # datasets raises its own errors, builders' errors and the network's
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if isinstance(error, ValueError):  # an unknown split or config: the message lists the known ones
            raise SourceError(f"Cannot open dataset {name!r}: {reason}") from error
        raise SourceError(
            f"There is no file, folder or reachable dataset {name!r} ({reason}). {hint}"
        ) from error
    return DatasetRows(name=path, config=config or None, column=_choose_column(data, name, column), data=data)


def _choose_column(data: Any, name: str, column: str | None) -> str:
    first = next(iter(data), None)
    if first is None:
        raise SourceError(f"The text is empty: dataset {name!r} has no row in this split.")
    strings = [key for key, value in first.items() if isinstance(value, str)]
    if column is None:
        column = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
        if column is None:
            raise SourceError(
                f"Dataset {name!r} has no single column of text. Choose a column of: {', '.join(first)}."
            )
    if column not in first:
        raise SourceError(f"Dataset {name!r} has no column {column!r}. It has: {', '.join(first)}.")
    return column
