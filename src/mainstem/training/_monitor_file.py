"""The file of a stream monitor: one record a recorded step, as JSON lines or as Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mainstem.errors import ConfigError, SourceError
from mainstem.sources import require
from mainstem.training._files import replace_text

SCHEMA_VERSION = 1

Record = Mapping[str, Any]


def read_monitor(path: str | Path) -> list[dict[str, Any]]:
    """Read the records that a :class:`StreamMonitor` has written, in order of steps.

    A last line that a killed run did not finish is left out.

    Args:
        path: a ``.jsonl`` or ``.parquet`` file.

    Raises:
        SourceError: there is no such file, or it holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise SourceError(f"{path} is no file; give what a StreamMonitor has written, such as stream.jsonl.")
    records = _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path)
    for record in records:
        if record.get("schema") != SCHEMA_VERSION:
            raise SourceError(
                f"{path} holds a record of schema {record.get('schema')!r}; this version of mainstem reads "
                f"schema {SCHEMA_VERSION} of a StreamMonitor."
            )
    return records


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    try:
        return [json.loads(line) for line in whole]
    except json.JSONDecodeError as error:
        raise SourceError(f"{path} is not a file of JSON lines: {error}.") from error


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    parquet = require("pyarrow.parquet", feature="Reading a Parquet file")
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} is not a Parquet file: {error}.") from error


class MonitorFile:
    """Appends records; what a resumed run does again is dropped first.

    JSON lines are written whole, one a record, as they come. A Parquet file cannot be appended to: it is
    written anew, beside the old one and then in its place, whenever :meth:`flush` is called or
    ``buffer_size`` records wait.

    Raises:
        ConfigError: the path ends in neither ``.jsonl`` nor ``.parquet``.
    """

    def __init__(self, path: Path, buffer_size: int = 32):
        if path.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"path {str(path)!r} must end in .jsonl or .parquet.")
        self.path, self.buffer_size = path, buffer_size
        self._waiting: list[Record] = []

    def begin(self, step: int) -> None:
        """Keep the records up to ``step`` (0: a new run) and drop the rest."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._waiting = []
        kept: list[dict[str, Any]] = []
        if step and self.path.is_file():
            kept = [record for record in read_monitor(self.path) if record["step"] <= step]
        if kept or self.path.suffix == ".jsonl":
            self._replace(kept)
        else:
            self.path.unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        """Add one record."""
        if self.path.suffix == ".parquet":
            self._waiting.append(record)
            if len(self._waiting) >= self.buffer_size:
                self.flush()
            return
        with self.path.open("ab", buffering=0) as file:
            file.write(_line(record).encode())

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            kept = read_monitor(self.path) if self.path.is_file() else []
            self._replace([*kept, *self._waiting])
            self._waiting = []

    def _replace(self, records: Sequence[Record]) -> None:
        if self.path.suffix == ".jsonl":
            replace_text(self.path, "".join(map(_line, records)))
            return
        pyarrow = require("pyarrow", feature="Writing a Parquet file")
        parquet = require("pyarrow.parquet", feature="Writing a Parquet file")
        schema = _parquet_schema(pyarrow)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        parquet.write_table(pyarrow.Table.from_pylist(list(records), schema=schema), temporary)
        os.replace(temporary, self.path)


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


# Column -> type, for Parquet; what `make_record` returns.
COLUMNS = {
    "schema": "int64",
    "step": "int64",
    "source": "string",
    "num_blocks": "int64",
    "tokens": "int64",
    "passes": "int64",
    "ranks": "int64",
    "skipped": "bool_",
    "state_block": "list int64",
    "stream_rms": "list float64",
    "stream_largest": "list float64",
    "outlier_ratio": "list float64",
    "outlier_position": "list int64",
    "outlier_channel": "list int64",
    "outlier_stream": "list int64",
    "gradient_norm": "list float64",
    "write_block": "list int64",
    "write_kind": "list string",
    "write_ratio": "list float64",
    "update_ratio": "list float64",
    "update_ratio_outside": "float64",
    "non_finite": "string",
    "non_finite_block": "int64",
    "additivity": "float64",
    "continuity": "float64",
    "notes": "list string",
}


def _parquet_schema(pyarrow: Any) -> Any:
    def kind(name: str) -> Any:
        if name.startswith("list "):
            return pyarrow.list_(kind(name.removeprefix("list ")))
        return getattr(pyarrow, name)()

    return pyarrow.schema([(column, kind(name)) for column, name in COLUMNS.items()])
