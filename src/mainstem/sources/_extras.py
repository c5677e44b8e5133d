"""Optional packages: imported when used, asked for by name when missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import platform
from collections.abc import Generator
from typing import Any

from mainstem.errors import MissingExtraError


def require(module: str, *, feature: str, extra: str = "hf") -> Any:
    """Import ``module`` or say which extra brings it.

    Args:
        module: name of an optional package, as imported, e.g. ``"transformers"``.
        feature: what the user wanted, as the subject of a sentence: ``"Loading a model"``.
        extra: of mainstem, which brings it.

    Raises:
        MissingExtraError: the package is not installed. An import error *inside* it is passed on unchanged.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise MissingExtraError(feature, package, extra) from error


def versions(*packages: str) -> dict[str, str | None]:
    """Versions for a provenance record: of Python, mainstem, torch and each ``package`` (None if missing)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("mainstem", "torch", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    """Silence transformers' progress bars and notices inside the block; its settings come back at the end."""
    settings = require("transformers.utils.logging", feature="Loading a model")
    bars, verbosity = settings.is_progress_bar_enabled(), settings.get_verbosity()
    settings.disable_progress_bar()
    settings.set_verbosity_error()
    try:
        with quiet_hub():
            yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()


@contextlib.contextmanager
def quiet_datasets() -> Generator[None]:
    """Silence the progress bars of ``datasets`` inside the block; its setting comes back at the end."""
    datasets = require("datasets", feature="Reading a dataset")
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def quiet_hub() -> Generator[None]:
    """Silence the hub client's log of its retries inside the block: what comes of them is said once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
