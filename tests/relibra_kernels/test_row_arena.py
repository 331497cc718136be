"""The arena of dispatched rows: nothing overlaps, words have lines of their own, sizes are told."""

import pytest
import torch

from relibra_kernels.transport.row_arena import BUFFERS, CHANNELS, RowLayout, table_of_rows
from relibra_kernels.transport.sync_types import pack_credit, pack_word

LAYOUT = RowLayout.of(3, {"x": 5000, "scores": 1, "y": 1024, "dx": 2048})


def places(layout):
    """(start, end) of everything in the arena."""
    for channel in CHANNELS:
        for buffer in range(BUFFERS):
            start = layout.rows(channel, buffer)
            yield start, start + layout.capacity(channel)
            for source in range(layout.num_ranks):
                yield layout.arrived(channel, buffer, source), None
        for rank in range(layout.num_ranks):
            yield layout.read(channel, rank), None
    yield layout.abort, None


def test_nothing_overlaps_and_all_is_inside():
    found = sorted((start, start + 128 if end is None else end) for start, end in places(LAYOUT))
    found = [(start, end) for start, end in found if end > start]
    assert all(end <= start for (_, end), (start, _) in zip(found, found[1:], strict=False))
    assert found[0][0] == 0
    assert found[-1][1] <= LAYOUT.nbytes < found[-1][1] + 1024
    words = [start for start, end in places(LAYOUT) if end is None]
    assert len(set(words)) == len(words) == 6 * (2 + 1) * 3 + 1
    assert all(word % 128 == 0 for word in words)


def test_sizes():
    sizes = [LAYOUT.capacity(name) for name in CHANNELS]
    assert sizes == [5120, 1024, 1024, 0, 2048, 0]
    report = LAYOUT.report()
    assert report["total"] == LAYOUT.nbytes == sum(report.values()) - report["total"]
    assert report["x"] == 2 * 5120
    base = torch.arange(LAYOUT.nbytes, dtype=torch.int64)
    assert LAYOUT.view(base, "y", 1, 10)[0] == LAYOUT.rows("y", 1)


@pytest.mark.parametrize(
    "call",
    [lambda: LAYOUT.arrived("x", 2, 0), lambda: LAYOUT.read("x", 3), lambda: LAYOUT.rows("y", -1)],
)
def test_an_index_out_of_range_is_refused(call):
    with pytest.raises(IndexError, match="index: need below"):
        call()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="channel: need one of 'x', 'scores'"):
        LAYOUT.rows("z", 0)
    with pytest.raises(ValueError, match="num_ranks: need"):
        RowLayout.of(0, {})
    with pytest.raises(ValueError, match="channel_bytes: need one of"):
        RowLayout(2, (0,))
    with pytest.raises(ValueError, match="channel_bytes of y: need multiples of 1024, got 5"):
        RowLayout(2, (0, 0, 5, 0, 0, 0))
    with pytest.raises(ValueError, match="channel_bytes of x"):
        RowLayout.of(2, {"x": -5000})


def test_table_names_what_was_written():
    words = {
        LAYOUT.read("x", 1): pack_credit(1, 7),
        LAYOUT.arrived("dx", 1, 2): pack_word(1, 4, 0xAB),
        LAYOUT.abort: 5,
    }
    text = table_of_rows(LAYOUT, 0, (4, 5, 6), lambda at: [words.get(a, 0) for a in at])
    assert text.splitlines() == [
        "  x, messages read: rank 4: 0, rank 5: 7, rank 6: 0",
        "  dx[1], messages arrived: rank 6: 4, hash 0x00ab",
        "  abort: 0x5",
    ]
