"""What must hold before an audit begins, and plain words for what fails while it runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from mainstem.errors import MainstemError
from mainstem.sources import WindowBatch


def check_device(device: str | None) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        MainstemError: there is none, or no such name.
    """
    if device in (None, "auto", "tp"):
        return
    try:
        torch.ones(1, device=device).item()  # the device `meta` has no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MainstemError(
            f"The device {device!r} cannot be used here ({_first_line(error)}). "
            "Choose --device cpu, or leave it out."
        ) from error


def window_that_fits(model: Any, window: int) -> int:
    """Return the window, if the model has positions for it.

    Raises:
        MainstemError: it is longer than the model's positions.
    """
    limit = num_positions(model)
    if limit is not None and window > limit:
        raise MainstemError(
            f"A window of {window} tokens is longer than the model's {limit} positions; use --window {limit}."
        )
    return window


def num_positions(model: Any) -> int | None:
    """Return how many positions the model has, None where its config does not say."""
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and padding is not None:
            return int(module.num_embeddings) - padding - 1  # RoBERTa's first position lies after its padding
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(model.config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def check_vocabulary(model: Any, window: WindowBatch) -> None:
    """Refuse tokens that the model has no embedding for.

    Raises:
        MainstemError: the tokenizer is of another model.
    """
    embedding = model.get_input_embeddings()
    known = getattr(embedding, "num_embeddings", None)
    largest = int(window.input_ids.max())
    if isinstance(known, int) and largest >= known:
        raise MainstemError(
            f"The tokenizer gives token {largest}, but the model has embeddings for {known} tokens: "
            "they do not belong together. Give the model its own tokenizer."
        )


@contextmanager
def clear_failures(model: Any) -> Generator[None]:
    """Say in a sentence what torch says in a page: no memory left, an operation that the dtype lacks.

    Raises:
        MainstemError: one of the two.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MainstemError(
            "The device ran out of memory. Use a smaller --batch-size or --window, a smaller --dtype, "
            "or --no-lens."
        ) from error
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        raise MainstemError(
            f"{type(model).__name__} cannot run in this dtype on this device ({_first_line(error)}). Use "
            "--dtype float32 or bfloat16."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
