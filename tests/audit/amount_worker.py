"""One process of an audit that several share: ``torchrun amount_worker.py WHAT MODEL OUT``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import tiny_models as tiny

from mainstem import cli
from mainstem.audit import Resume, joined, run_audit
from mainstem.audit._passes import Passes
from mainstem.errors import MainstemError

CASES: dict[str, dict[str, Any]] = {
    "a last window that is short": {"tokens": 13 * 16 + 5, "batch_size": 2},
    "fewer windows than processes": {"tokens": 10, "batch_size": 1},
    "float64": {"tokens": 8 * 16, "batch_size": 2, "dtype": "float64", "pad_side": "left"},
}
INTERRUPTED = {"tokens": 20 * 16, "batch_size": 1}


def share(folder: str, out: Path) -> None:
    """Audit every case, and one that is interrupted once; every process writes what it has found."""
    with joined() as ranks:

        def write(name: str, result: Any) -> None:
            (out / f"{name}-{ranks.rank}.json").write_text(json.dumps(result.to_dict()), "utf-8")

        for name, changes in CASES.items():
            write(name, run_audit(tiny.config(folder, **changes)))
        one_batch = Passes._batch

        def pressed(self: Passes, window: Any) -> None:
            if window.first_sequence >= 12:
                raise KeyboardInterrupt
            one_batch(self, window)

        Passes._batch = pressed
        try:
            run_audit(tiny.config(folder, **INTERRUPTED), resume=Resume(out / "kept", every=4))
        except KeyboardInterrupt:
            Passes._batch = one_batch
        resume = Resume(out / "kept")
        write("interrupted", run_audit(tiny.config(folder, **INTERRUPTED), resume=resume))
        (out / f"gone on from {ranks.rank}").write_text(
            " ".join(sorted(p.name for p in resume.folder.iterdir()))
        )


def fail(folder: str, out: Path) -> None:
    """Let the second process fail in the middle of the command."""
    one_batch = Passes._batch

    def broken(self: Passes, window: Any) -> None:
        if os.environ["RANK"] == "1":
            raise MainstemError("this process has had enough.")
        one_batch(self, window)

    Passes._batch = broken
    sys.argv = [
        "mainstem",
        "audit",
        folder,
        "--text",
        str(tiny.GPL),
        "--window",
        "16",
        "--out",
        str(out / "o"),
    ]
    cli.main()


def main() -> int:
    """Do what was asked for."""
    try:
        {"share": share, "fail": fail}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
