"""From ``package.module:factory`` or ``path/to/file.py:factory`` to a callable."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from mainstem.check._subject import brief
from mainstem.errors import ConfigError

FORM = "package.module:factory or path/to/file.py:factory"


def load_factory(spec: str) -> Callable[..., Any]:
    """Import the module that ``spec`` names, which runs its code, and return the callable in it.

    Args:
        spec: ``package.module:factory`` (found from the current folder too, as ``python -m`` does), or
            ``path/to/file.py:factory``. The part after the colon may have dots: ``module:Class.method``.

    Raises:
        ConfigError: ``spec`` has another form, the module cannot be imported, or has no such callable.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{spec!r} names no factory; expected {FORM}.")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{place} has no {name!r}; expected {FORM}.") from None
    if not callable(found):
        raise ConfigError(
            f"{spec} is a {type(found).__name__}; expected a callable that takes a depth and gives a module."
        )
    return found


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}; expected {FORM}.")
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"_checked_{id(path)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as `python path/to/file.py` does
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    finally:
        sys.path.remove(folder)
    return module


def _from_package(name: str) -> ModuleType:
    here = os.getcwd()
    inserted = here not in sys.path and "" not in sys.path
    if inserted:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _broken(name, error) from error
    finally:
        if inserted and here in sys.path:
            sys.path.remove(here)


def _broken(name: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{name} cannot be imported ({brief(error)}).")
