"""Where everything lies in an arena of dispatched rows: receive buffers and their sync words.

Letters: C channels, W buffers of a channel, P ranks of the domain.

    rows[C][W]       receive buffers; rows of all sources, by ascending source rank
    arrived[C][W][P] words: the rows of a source are there, written by that source
    read[C][P]       credits: messages read, written by each rank at all ranks
    abort            word: the generation of a run that failed

Every word has a line of 128 bytes to itself, so that no two writers share one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from relibra_kernels.checks import check_choice, check_int
from relibra_kernels.slot_layout import ALIGN_BYTES
from relibra_kernels.transport.arena_layout import WORD_LINE_BYTES, place_of
from relibra_kernels.transport.symmetric_heap import MAX_BYTES, round_up
from relibra_kernels.transport.sync_types import unpack_credit, unpack_word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

CHANNELS = ("x", "scores", "y", "dy", "dx", "dscores")
OUT_CHANNELS = ("x", "scores", "dy")  # to where rows are computed; the others lead back
BUFFERS = 2  # W: a rank may be this many messages of a channel ahead of its slowest reader


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Byte offsets inside every rank's part; the same on all ranks.

    Attributes:
        num_ranks: P.
        channel_bytes: of one buffer of each channel, in the order of `CHANNELS`.

    Example:
        >>> layout = RowLayout.of(2, {"x": 3000, "y": 100})
        >>> layout.rows("x", 1), layout.rows("y", 0), layout.capacity("y"), layout.capacity("dx")
        (3072, 6144, 1024, 0)
        >>> layout.arrived("x", 0, 1), layout.read("x", 0), layout.abort, layout.nbytes
        (8320, 11264, 12800, 13312)
    """

    num_ranks: int
    channel_bytes: tuple[int, ...]

    @classmethod
    def of(cls, num_ranks: int, channel_bytes: Mapping[str, int]) -> RowLayout:
        """Buffers that hold at least so many bytes; channels that are not named hold none."""
        sizes = [round_up(channel_bytes.get(name, 0), ALIGN_BYTES) for name in CHANNELS]
        return cls(num_ranks, tuple(sizes))

    def __post_init__(self) -> None:
        """Check sizes."""
        check_int("num_ranks", self.num_ranks, minimum=1)
        if len(self.channel_bytes) != len(CHANNELS):
            raise ValueError(f"channel_bytes: need one of {CHANNELS} each, got {self}")
        for name, size in zip(CHANNELS, self.channel_bytes, strict=True):
            check_int(f"channel_bytes of {name}", size, minimum=0, maximum=MAX_BYTES)
            if size % ALIGN_BYTES:
                raise ValueError(f"channel_bytes of {name}: need multiples of 1024, got {size}")

    def capacity(self, channel: str) -> int:
        """Bytes of one buffer of a channel."""
        return self.channel_bytes[channel_number(channel)]

    def rows(self, channel: str, buffer: int) -> int:
        """Offset of ``rows[channel][buffer]``."""
        number = channel_number(channel)
        earlier = BUFFERS * sum(self.channel_bytes[:number])
        return earlier + place_of((buffer,), (BUFFERS,)) * self.channel_bytes[number]

    def arrived(self, channel: str, buffer: int, source: int) -> int:
        """Offset of the word ``arrived[channel][buffer][source]``."""
        place = channel_number(channel), buffer, source
        line = place_of(place, (len(CHANNELS), BUFFERS, self.num_ranks))
        return self._words + line * WORD_LINE_BYTES

    def read(self, channel: str, rank: int) -> int:
        """Offset of the credit ``read[channel][rank]``."""
        place = place_of((channel_number(channel), rank), (len(CHANNELS), self.num_ranks))
        first = len(CHANNELS) * BUFFERS * self.num_ranks
        return self._words + (first + place) * WORD_LINE_BYTES

    @functools.cached_property
    def abort(self) -> int:
        """Offset of the word ``abort``."""
        lines = len(CHANNELS) * (BUFFERS + 1) * self.num_ranks
        return self._words + lines * WORD_LINE_BYTES

    @functools.cached_property
    def nbytes(self) -> int:
        """Size of a rank's part, a multiple of 1024."""
        return round_up(self.abort + WORD_LINE_BYTES, ALIGN_BYTES)

    def view(self, base: torch.Tensor, channel: str, buffer: int, nbytes: int) -> torch.Tensor:
        """The first bytes of a buffer, uint8 ``[nbytes]``.

        Args:
            base: a rank's part, uint8.
            channel: one of `CHANNELS`.
            buffer: below W.
            nbytes: at most `capacity`.
        """
        start = self.rows(channel, buffer)
        return base[start : start + nbytes]

    def report(self) -> dict[str, int]:
        """Bytes of the buffers of each channel on one rank, then ``words`` and ``total``."""
        sizes = {
            name: BUFFERS * size for name, size in zip(CHANNELS, self.channel_bytes, strict=True)
        }
        return {**sizes, "words": self.nbytes - self._words, "total": self.nbytes}

    @functools.cached_property
    def _words(self) -> int:
        return BUFFERS * sum(self.channel_bytes)


def channel_number(channel: str) -> int:
    """Place of a channel among `CHANNELS`.

    Raises:
        ValueError: there is no such channel.
    """
    return CHANNELS.index(check_choice("channel", channel, CHANNELS))


def table_of_rows(
    layout: RowLayout,
    base: int,
    domain: Sequence[int],
    load: Callable[[Sequence[int]], list[int]],
) -> str:
    """All words of a rank that were ever written, as text.

    Args:
        layout: of the arena.
        base: address of the rank's part.
        domain: EP ranks.
        load: addresses -> words.
    """
    lines, places = [], range(layout.num_ranks)
    for channel in CHANNELS:
        words = load([base + layout.read(channel, place) for place in places])
        if any(words):
            counts = [unpack_credit(word)[1] for word in words]
            shown = ", ".join(f"rank {r}: {n}" for r, n in zip(domain, counts, strict=True))
            lines.append(f"  {channel}, messages read: {shown}")
        for buffer in range(BUFFERS):
            words = load([base + layout.arrived(channel, buffer, place) for place in places])
            parts = [unpack_word(word) for word in words]
            shown = ", ".join(
                f"rank {rank}: {part.n}, hash {part.hash16:#06x}"
                for rank, word, part in zip(domain, words, parts, strict=True)
                if word
            )
            if shown:
                lines.append(f"  {channel}[{buffer}], messages arrived: {shown}")
    (abort,) = load([base + layout.abort])
    lines.append(f"  abort: {abort:#x}")
    return "\n".join(lines)
