"""The tokens of a text as they are asked for, without tokenising more of it than they need.

The tokens are those of the whole text: a text is tokenised in overlapping segments, and a segment is taken up
where its tokens and their places agree with the last ones taken from the segment before. Tokens close to a
segment's end are not taken, for what follows could change them.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from array import array
from collections.abc import Iterator
from typing import Any

from mainstem.errors import SourceError

from ._texts import TextSource

_SEGMENT = 1 << 18  # characters tokenised at a time
_SMALLEST = 1 << 14
_MARGIN = 1 << 11  # characters before a segment's end whose tokens are not taken
_OVERLAP = 1 << 11  # characters tokenised again at the start of the next segment
_AGREE = 16  # tokens, with their places, that must be the same in both segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids of the beginning of a text.

    Attributes:
        ids: token ids, at most as many as asked for.
        whole_text: whether they are all of the text's tokens.
        sha256: of the part of the text that was read, as UTF-8.
        num_chars_read: its length in characters.
    """

    ids: array[int]
    whole_text: bool
    sha256: str
    num_chars_read: int


class _Reader:
    """Hands out the text's beginning; knows its hash, length and whether the end was seen."""

    def __init__(self, text: TextSource):
        self._chunks = text.chunks()
        self._digest = hashlib.sha256()
        self._rest = ""  # of the last piece
        self.num_chars = self.num_bytes = 0
        self.ended = False

    def more(self, num_chars: int) -> str:
        """``num_chars`` further characters, fewer only at the text's end."""
        pieces, held = [self._rest], len(self._rest)
        while held <= num_chars:  # one more than asked for, to know whether the text ends here
            piece = next(self._chunks, None)
            if piece is None:
                self.ended = True
                break
            pieces.append(piece)
            held += len(piece)
        joined = "".join(pieces)
        taken, self._rest = joined[:num_chars], joined[num_chars:]
        data = taken.encode()
        self._digest.update(data)
        self.num_bytes += len(data)
        self.num_chars += len(taken)
        return taken

    @property
    def sha256(self) -> str:
        """Of what was handed out, as UTF-8."""
        return self._digest.hexdigest()

    def tokens(self, ids: array[int], limit: int | None) -> Tokens:
        complete = self.ended and (limit is None or len(ids) <= limit)
        return Tokens(
            ids=ids if limit is None else ids[:limit],
            whole_text=complete,
            sha256=self.sha256,
            num_chars_read=self.num_chars,
        )


def first_tokens(tokenizer: Any, text: TextSource, limit: int | None) -> Tokens:
    """The first ``limit`` token ids of ``text`` (all if None), equal to those of tokenising all of it.

    No special tokens are added; ones spelled out in the text are the tokenizer's own business.

    Args:
        tokenizer: of ``transformers``. A fast one is fed in segments of bounded size; a slow one, or one
            whose segments do not agree, gets a prefix that is doubled until its first tokens no longer
            change.
        text: read no further than needed.
        limit: number of tokens, or None.
    """
    if getattr(tokenizer, "is_fast", False):
        reader, ids = _Reader(text), array("q")
        try:
            for piece in _Stitcher(tokenizer, reader, limit).pieces():
                ids.extend(piece)
            return reader.tokens(ids, limit)
        except _NoSeamError:
            pass
    return _by_prefix(tokenizer, _Reader(text), limit)


class TokenStream:
    """The same tokens, a segment's worth at a time: what is held does not grow with the text.

    Only a slow tokenizer, or one whose segments do not agree, needs the text whole.

    Args:
        tokenizer, text, limit: as for `first_tokens`.

    Attributes:
        num_tokens: how many were handed out in the iteration that is under way or done.
        whole_text: whether the text's end was seen and no token of it left out.
        sha256, num_chars_read: of the text read so far.
    """

    def __init__(self, tokenizer: Any, text: TextSource, limit: int | None):
        self._tokenizer, self._text, self._limit = tokenizer, text, limit
        self._reader = _Reader(text)
        self.num_tokens = 0
        self.whole_text = False

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the text read so far, as UTF-8."""
        return self._reader.sha256

    @property
    def num_chars_read(self) -> int:
        """Characters of the text read so far."""
        return self._reader.num_chars

    @property
    def num_bytes_read(self) -> int:
        """Their length as UTF-8."""
        return self._reader.num_bytes

    def __iter__(self) -> Iterator[array[int]]:
        """Yield the tokens from the first on.

        Raises:
            SourceError: tokens that were handed out turn out to be others in the whole text.
        """
        self._reader, self.num_tokens, self.whole_text = _Reader(self._text), 0, False
        digest = hashlib.sha256()
        try:
            if not getattr(self._tokenizer, "is_fast", False):
                raise _NoSeamError
            for piece in _Stitcher(self._tokenizer, self._reader, self._limit).pieces():
                room = len(piece) if self._limit is None else self._limit - self.num_tokens
                self.whole_text = self._reader.ended and len(piece) <= room
                self.num_tokens += min(len(piece), room)
                digest.update(piece[:room].tobytes())
                yield piece[:room]
        except _NoSeamError:
            self._reader = _Reader(self._text)
            found = _by_prefix(self._tokenizer, self._reader, self._limit)
            given = found.ids[: self.num_tokens]
            if hashlib.sha256(given.tobytes()).digest() != digest.digest():
                raise SourceError(
                    f"The tokens of {self._text.name!r} depend on text further on than this tokenizer's "
                    "segments reach, so it cannot be read piece by piece. Give a number of tokens, or a "
                    "shorter text."
                ) from None
            rest = found.ids[self.num_tokens :]
            self.num_tokens, self.whole_text = len(found.ids), found.whole_text
            yield rest


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text``, no special token added, no warning about length."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _by_prefix(tokenizer: Any, reader: _Reader, limit: int | None) -> Tokens:
    size = _SEGMENT if limit is None else max(_SMALLEST, 8 * limit)
    prefix = reader.more(size)
    before: list[int] | None = None
    while not reader.ended:
        if limit is not None:
            ids = encode(tokenizer, prefix)
            if before is not None and len(before) >= limit and before[:limit] == ids[:limit]:
                return reader.tokens(array("q", ids), limit)
            before = ids
        prefix += reader.more(len(prefix))
    return reader.tokens(array("q", encode(tokenizer, prefix)), limit)


class _NoSeamError(Exception):
    """Two segments do not agree on the tokens where they meet."""


class _Stitcher:
    """Tokenises a text segment by segment; positions are characters from the text's beginning."""

    def __init__(self, tokenizer: Any, reader: _Reader, limit: int | None):
        self._tokenizer, self._reader, self._limit = tokenizer, reader, limit
        self._size = _SEGMENT if limit is None else min(_SEGMENT, max(_SMALLEST, 6 * limit))
        self._tail: list[tuple[int, int, int]] = []  # the last tokens taken: start, end, id
        self._buffer, self._base = "", 0

    def pieces(self) -> Iterator[array[int]]:
        """Yield the tokens of each segment, until there are as many as the limit, or more.

        Raises:
            _NoSeamError: two segments do not agree.
        """
        taken = 0
        while True:
            self._buffer += self._reader.more(self._size)
            spans = self._spans(self._buffer)
            begin = self._resume(spans)
            if begin is None:
                raise _NoSeamError
            end = len(spans) if self._reader.ended else self._last_safe(spans, begin)
            if end == begin and not self._reader.ended:
                self._size *= 2  # one token, or one character of many tokens, fills the segment
                continue
            taken += end - begin
            is_last = self._reader.ended or (self._limit is not None and taken >= self._limit)
            if is_last and not self._reader.ended and not self._holds(spans[:end]):
                raise _NoSeamError
            yield array("q", (token for _, _, token in spans[begin:end]))
            if is_last:
                return
            self._tail = spans[max(0, end - _AGREE) : end]
            self._drop_before(spans[end - 1][1] - _OVERLAP)

    def _holds(self, spans: list[tuple[int, int, int]]) -> bool:
        """Whether a shorter buffer gives the same tokens."""
        return self._spans(self._buffer[: -(_MARGIN // 2)])[: len(spans)] == spans

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        pairs = zip(encoded["offset_mapping"], encoded["input_ids"], strict=True)
        return [(start + self._base, end + self._base, token) for (start, end), token in pairs]

    def _resume(self, spans: list[tuple[int, int, int]]) -> int | None:
        """Index of the first token after those taken, where the tokens before it are the last ones taken."""
        if not self._tail:
            return 0
        guess = bisect.bisect_left(spans, self._tail[-1][1], key=lambda span: span[0])
        for index in range(guess, min(guess + _AGREE, len(spans)) + 1):
            if index >= len(self._tail) and spans[index - len(self._tail) : index] == self._tail:
                return index
        return None

    def _last_safe(self, spans: list[tuple[int, int, int]], begin: int) -> int:
        """End of the tokens that lie far enough before the buffer's end and do not cut a character in two."""
        latest = self._base + len(self._buffer) - _MARGIN
        end = bisect.bisect_right(spans, latest, lo=begin, key=lambda span: span[1])
        while end > begin and end < len(spans) and spans[end][0] < spans[end - 1][1]:
            end -= 1
        return end

    def _drop_before(self, position: int) -> None:
        """Forget the buffer's text before ``position``, which becomes its start."""
        position = max(position, self._base)
        self._buffer, self._base = self._buffer[position - self._base :], position
