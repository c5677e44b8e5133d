"""The errors of mainstem: what was given, what was expected, and the shortest fix."""


class MainstemError(ValueError):
    """Root of every error that a user's input can cause."""


class ConfigError(MainstemError):
    """A configuration that cannot be built."""


class StreamNotFoundError(MainstemError):
    """The model has no residual stream that its data flow shows."""


class BooksError(MainstemError):
    """A figure was refused because additivity or continuity did not hold."""


class SourceError(MainstemError):
    """A model or a text that could not be found, read or used."""


class MissingExtraError(MainstemError):
    """An optional dependency is not installed; the message names the install command."""

    def __init__(self, feature: str, package: str, extra: str):
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'mainstem[{extra}]'"
        )
