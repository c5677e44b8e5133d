"""Every argument of the Trainer, from the command line."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from mainstem.errors import ConfigError
from mainstem.sources import require


def trainer_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Parse ``--name value`` flags of :class:`transformers.TrainingArguments`.

    Returns:
        Those that were given, by name.

    Raises:
        ConfigError: an unknown name (the nearest known one is told), or a value of the wrong type.
    """
    transformers = require("transformers", feature="Training", extra="train")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments, allow_abbrev=False)
    known = sorted({flag for action in parser._actions for flag in action.option_strings})
    for action in parser._actions:
        action.default = argparse.SUPPRESS

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = refuse
    given, unknown = parser.parse_known_args(list(flags))
    if unknown and not unknown[0].startswith("-"):
        refuse(f"{unknown[0]!r} stands behind options; if it is the name of a recipe, put it first.")
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {near[0]}?" if near else "; see `mainstem train --help`."
        refuse(f"{unknown[0]!r} is neither an option of mainstem nor of the Trainer{hint}")
    return vars(given)


def options(pairs: Sequence[str], what: str) -> dict[str, Any]:
    """Parse ``name=value`` pairs; a value is read as JSON where it is JSON, and as a string elsewhere.

    Raises:
        ConfigError: a pair without ``=``.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ConfigError(f"{what} {pair!r} must have the form NAME=VALUE.")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = {"True": True, "False": False, "None": None}.get(value, value)
    return found
