"""Windows of tokens, in batches, with masks and positions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mainstem.errors import SourceError

from ._texts import TextSource, load_text
from ._tokens import Tokens, TokenStream, encode, first_tokens

PadSide = Literal["right", "left"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowBatch:
    """Some windows, padded to one length.

    Attributes:
        input_ids: ``[batch, pos]`` int64.
        attention_mask: ``[batch, pos]`` int64, 1 for a token (an added first token too), 0 for padding.
        position_ids: ``[batch, pos]`` int64, each token's place in its window from 0, counted by the mask; 0
            at padding.
        first_sequence: number of the first row among all windows.
        num_added: tokens at each row's start that are not the text's: 1 with a first token, else 0.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    first_sequence: int
    num_added: int

    def to(self, device: str | torch.device) -> WindowBatch:
        """The same batch on another device."""
        return dataclasses.replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            position_ids=self.position_ids.to(device),
        )

    def inputs_for(self, model: nn.Module) -> dict[str, Tensor]:
        """Keyword arguments for ``model``: ids and mask, and positions where they are needed and understood.

        Positions are passed only where the padding is on the left: with it on the right every model's own
        default is right. They are never passed to a model whose positions start after its padding index
        (RoBERTa and its kin), which counts them from the ids itself.
        """
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        padded_left = bool((self.attention_mask[:, 0] == 0).any())
        if padded_left and _takes_positions(model) and not _counts_positions_itself(model):
            inputs["position_ids"] = self.position_ids
        return inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """A text cut into windows; iterate for batches, as often as wanted.

    Window ``i`` holds the text's tokens ``[i * step, (i + 1) * step)``, after the first token if there is
    one; ``step`` is ``window`` less that token. The last window may be shorter and is padded.

    Attributes:
        token_ids: ``[num_tokens]`` int64, the text's tokens, first tokens not among them.
        window: tokens in a full window, the added first one included.
        batch_size: windows in a batch; the last batch may have fewer.
        first_token_id: id that begins every window, or None.
        pad_side: where the last window is padded.
        pad_id: id that fills the padding; it is masked and its value does not matter.
        provenance: JSON-ready facts: text, its hash, counts, the first-token policy in words, first ids and
            tokens.
    """

    token_ids: Tensor
    window: int
    batch_size: int
    first_token_id: int | None
    pad_side: PadSide
    pad_id: int
    provenance: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self.token_ids.numel()

    @property
    def step(self) -> int:
        """Tokens of the text in a full window."""
        return self.window - (self.first_token_id is not None)

    @property
    def num_windows(self) -> int:
        """Windows in all, the last padded one too."""
        return -(-self.num_tokens // self.step)

    def __len__(self) -> int:
        """Batches in all."""
        return -(-self.num_windows // self.batch_size)

    @property
    def expected_batches(self) -> int:
        """Batches in all; as for a `WindowStream`, which can only expect."""
        return len(self)

    def __iter__(self) -> Iterator[WindowBatch]:
        """Yield the batches in the order of the text."""
        for first in range(0, self.num_windows, self.batch_size):
            last = min(first + self.batch_size, self.num_windows)
            rows = [self.token_ids[i * self.step : (i + 1) * self.step] for i in range(first, last)]
            yield pad_rows(rows, first, self.first_token_id, self.pad_side, self.pad_id)


def pad_rows(
    rows: list[Tensor], first_sequence: int, first_token_id: int | None, pad_side: PadSide, pad_id: int
) -> WindowBatch:
    """Return windows of the text's tokens as one batch."""
    if first_token_id is not None:
        rows = [torch.cat([torch.tensor([first_token_id]), row]) for row in rows]
    length = max(row.numel() for row in rows)
    ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), length), dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(0, row.numel()) if pad_side == "right" else slice(length - row.numel(), length)
        ids[index, place] = row
        mask[index, place] = 1
    return WindowBatch(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0) * mask,
        first_sequence=first_sequence,
        num_added=int(first_token_id is not None),
    )


def make_windows(
    tokenizer: Any,
    text: TextSource | str,
    *,
    num_tokens: int | None = 2048,
    window: int = 256,
    batch_size: int = 4,
    first_token: str = "none",
    pad_side: PadSide = "right",
) -> Windows:
    """Cut the beginning of a text into windows of tokens.

    The tokens are those that tokenising the whole text gives, and the text is read no further than they need.

    What a window begins with changes what a model's stream looks like (many models gather a massive
    activation on it, and the token that a tokenizer calls ``bos`` is not always the one the model was trained
    with), so it is a choice that is stated, not a default of the tokenizer.

    Args:
        tokenizer: of ``transformers``.
        text: from `load_text`, or a str that is the text itself.
        num_tokens: tokens of the text to use, added first tokens not counted; None for all. A shorter text is
            used whole.
        window: tokens in a window, the first one included.
        batch_size: windows in a batch.
        first_token: ``"none"`` adds nothing; ``"bos"`` and ``"eos"`` are the tokenizer's; any other string
            must be exactly one token, e.g. ``"<|endoftext|>"`` or a line feed.
        pad_side: ``"right"`` or ``"left"``.

    Raises:
        SourceError: no tokenizer, fewer than two tokens of text, or a first token that the tokenizer does not
            have.
    """
    check_choices(tokenizer, num_tokens, window, batch_size, pad_side)
    source = load_text(text, kind="literal") if isinstance(text, str) else text
    first_id = first_token_id_of(tokenizer, first_token)
    tokens = first_tokens(tokenizer, source, num_tokens)
    if len(tokens.ids) < 2:
        raise too_short(source.name, len(tokens.ids))
    windows = Windows(
        token_ids=torch.tensor(tokens.ids, dtype=torch.int64),
        window=window,
        batch_size=batch_size,
        first_token_id=first_id,
        pad_side=pad_side,
        pad_id=pad_id_of(tokenizer),
        provenance={},
    )
    says = provenance_of(
        source,
        tokenizer,
        tokens,
        num_tokens=windows.num_tokens,
        num_windows=windows.num_windows,
        first_ids=windows.token_ids[:6].tolist(),
        requested_tokens=num_tokens,
        window=window,
        batch_size=batch_size,
        first_token=first_token,
        first_token_id=first_id,
        pad_side=pad_side,
        pad_id=windows.pad_id,
    )
    return dataclasses.replace(windows, provenance=says)


def check_choices(
    tokenizer: Any, num_tokens: int | None, window: int, batch_size: int, pad_side: str
) -> None:
    """Refuse what no windows can be cut by.

    Raises:
        SourceError: no tokenizer, or a choice out of range.
    """
    if tokenizer is None:
        raise SourceError(
            "The model comes without a tokenizer, so a text cannot be cut into tokens: add tokenizer.json."
        )
    for what, value, least in (
        ("num_tokens", num_tokens, 2),
        ("window", window, 2),
        ("batch_size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise SourceError(f"{what} is {value}; it must be at least {least}.")
    if pad_side not in ("right", "left"):
        raise SourceError(f"pad_side is {pad_side!r}; it must be 'right' or 'left'.")


def too_short(name: str, num_tokens: int) -> SourceError:
    """The error of a text of fewer than two tokens."""
    return SourceError(f"The text {name!r} is {num_tokens} token(s) long; at least two are needed.")


def first_token_id_of(tokenizer: Any, first_token: str) -> int | None:
    if first_token == "none":
        return None
    if first_token in ("bos", "eos"):
        found = getattr(tokenizer, f"{first_token}_token_id")
        if found is None:
            raise SourceError(f"This tokenizer has no {first_token} token. Choose 'none' or name a token.")
        return int(found)
    found = tokenizer.get_vocab().get(first_token)
    if found is not None:
        return int(found)
    ids = encode(tokenizer, first_token)
    if len(ids) != 1 or ids[0] == getattr(tokenizer, "unk_token_id", None):
        raise SourceError(
            f"The first token {first_token!r} is not one token that this tokenizer knows: {ids}. "
            "Choose 'none', 'bos', 'eos' or a string that is exactly one token."
        )
    return ids[0]


def _policy(first_token: str, first_id: int | None) -> str:
    if first_id is None:
        return "nothing is added: each window begins with the text's own token"
    return f"each window begins with token {first_id} ({first_token}), which is not part of the text"


def pad_id_of(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        if (found := getattr(tokenizer, name, None)) is not None:
            return int(found)
    return 0


def provenance_of(
    source: TextSource,
    tokenizer: Any,
    read: Tokens | TokenStream,
    *,
    first_ids: list[int],
    first_token: str,
    first_token_id: int | None,
    **choices: Any,
) -> dict[str, Any]:
    """Return JSON-ready facts about windows; ``choices`` go in as they are."""
    whole = source.sha256()
    return {
        "text": {
            **source.provenance,
            "sha256": whole or read.sha256,
            "sha256_of": "the whole text, as UTF-8"
            if whole
            else f"its first {read.num_chars_read} characters, as UTF-8",
        },
        "tokenizer": type(tokenizer).__name__,
        "whole_text": read.whole_text,
        **choices,
        "first_token": first_token,
        "first_token_id": first_token_id,
        "first_token_policy": _policy(first_token, first_token_id),
        "first_ids": first_ids,
        "first_tokens": [str(token) for token in tokenizer.convert_ids_to_tokens(first_ids)],
    }


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


@functools.lru_cache(maxsize=8)
def _counts_positions_itself(model: nn.Module) -> bool:
    """Whether a position table has a padding index: then its first real row is not row 0."""
    return any(
        name.rpartition(".")[2] == "position_embeddings" and getattr(module, "padding_idx", None) is not None
        for name, module in model.named_modules()
    )
