"""Which token's logit is attributed to the writes, and at which position."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from mainstem.errors import ConfigError
from mainstem.measure import Batch
from mainstem.observe import Attribution, Ledger, Recording, attribute


@dataclasses.dataclass(frozen=True)
class Attributed:
    """One or two tokens' logits at one position of the first window, ``position`` padding not counted."""

    found: Attribution
    position: int


def tokens_of(words: str | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the one or two tokens that ``"TOKEN"`` or ``"A,B"`` means, none for None.

    Raises:
        ConfigError: a word is not one token.
    """
    if words is None:
        return ()
    whole = _ids(words, tokenizer)
    if len(whole) == 1:
        return (whole[0],)
    for i in (i for i, letter in enumerate(words) if letter == ","):
        pair = [_ids(part, tokenizer) for part in (words[:i], words[i + 1 :])]
        if all(len(ids) == 1 for ids in pair):
            return pair[0][0], pair[1][0]
    raise ConfigError(
        f"attribute is {words!r}, which is {_pieces(whole, tokenizer)}, not one token, nor two with a comma "
        "between them; a word inside a text is usually a token only with the space before it, as in ' Paris'."
    )


def attributed(
    books: Ledger, seen: Recording, logits: Tensor, batch: Batch, tokens: tuple[int, ...]
) -> Attributed:
    """Attribute the given tokens at the window's last position, or the model's two best where it scores last.

    Raises:
        StreamNotFoundError: the model's head is not linear.
        ConfigError: a token has no logit, or the output is no sequence of logits.
    """
    if seen.tail is None or logits.ndim != 3:
        raise ConfigError("the model's output is not made of its final state token by token.")
    columns = batch.mask[0].nonzero().flatten().tolist()
    position = len(columns) - 1
    if not tokens:
        position = max(0, position - 1)  # the last one predicts what is no longer in the window
        tokens = tuple(logits[0, columns[position]].topk(2).indices.tolist())
    found = attribute(books, seen.tail, logits, tokens, sequence=0, position=columns[position])
    return Attributed(found, position)


def _ids(words: str, tokenizer: Any) -> list[int]:
    return list(tokenizer(words, add_special_tokens=False)["input_ids"]) if words else []


def _pieces(ids: list[int], tokenizer: Any) -> str:
    shown = ", ".join(repr(tokenizer.decode([i])) for i in ids[:6])
    return f"{len(ids)} tokens ({shown}{', ...' if len(ids) > 6 else ''})"
