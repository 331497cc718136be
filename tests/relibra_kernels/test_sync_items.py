"""Items of a use of replica synchronisation: addresses are those of the rows that are meant."""

import ctypes

import numpy as np
import pytest
import torch
from sync_world import FIELDS, NUM_HOME, Schedule, arena_layout, zero_grads

from relibra_kernels.transport.heap_local import LocalHeap
from relibra_kernels.transport.sync_items import Copy, SyncItems, Use, sources_of
from relibra_kernels.transport.sync_report import UseKey

KEY = UseKey("actor", 3, "train", 2, 7, "forward")
WEIGHTS = Schedule(1, 1).weights(7, 0)
COPIES = tuple(Copy(slot=s, peer=1, home_slot=h, expert=h) for s, h in enumerate((2, 0)))


class Listed:
    """H tensors seen as one, as `relibra.expert_weights.SlotList` is."""

    def __init__(self, whole):
        self.rows = [row.clone() for row in whole]
        self.shape, self.dtype = whole.shape, whole.dtype

    def __getitem__(self, slot):
        return self.rows[slot]


def strided_rows(whole):
    return whole.transpose(1, -1).contiguous().transpose(1, -1) if whole.dim() > 2 else whole


def wide_steps(whole):
    return torch.stack([whole, whole], 1)[:, 0]


@pytest.fixture
def items():
    heaps, layout = LocalHeap.ranks(2), arena_layout(2)
    arenas = [heap.alloc(layout.nbytes, 1) for heap in heaps]
    yield SyncItems(arenas[0], layout)
    for heap in heaps:
        heap.close()


def read(found):
    return [ctypes.string_at(int(one["src"]), int(one["bytes"])) for one in found]


@pytest.mark.parametrize("form", [torch.clone, Listed, strided_rows, wide_steps])
def test_rows_of_every_form_are_pushed(items, form):
    weights = {name: form(w) for name, w in WEIGHTS.items()}
    items.check_fields(weights)
    use = Use(0, KEY, "plan", COPIES, ())
    found, keep = items.pushed(use, weights)
    sources_of(weights)
    del weights
    need = [
        w[copy.home_slot].contiguous().view(torch.uint8).numpy().tobytes()
        for copy in COPIES
        for w in WEIGHTS.values()
    ]
    assert read(found) == need
    assert keep
    base, layout = items.arena.peers[1], items.layout
    last = found[len(FIELDS) - 1 :: len(FIELDS)]
    assert last["full"].tolist() == [base + layout.full(0, copy.slot) for copy in COPIES]
    assert np.count_nonzero(found["full"]) == len(COPIES)
    starts = [base + layout.weight_slot(0, copy.slot) for copy in COPIES]
    assert found["dst"][:: len(FIELDS)].tolist() == starts


def test_a_field_with_too_few_rows_is_refused(items):
    short = {name: w[: NUM_HOME - 1] for name, w in WEIGHTS.items()}
    with pytest.raises(IndexError, match="slots: need below 2, got"):
        items.pushed(Use(0, KEY, "plan", COPIES, ()), short)


@pytest.mark.parametrize("form", [torch.clone, Listed, wide_steps])
def test_gradients_of_every_form_are_found(items, form):
    grads = {name: form(g) for name, g in zero_grads().items()}
    use = Use(0, KEY, "plan", COPIES, (), q=1)
    found, keep = items.reduced(use, grads)
    rows = [g[copy.home_slot] for g in grads.values() for copy in COPIES]
    assert found["home"].tolist() == [row.data_ptr() for row in rows]
    assert found["count"].tolist() == [row.numel() for row in rows]
    layout = items.layout
    need = [
        items.arena.peers[1] + layout.grad_slot(1, copy.slot) + field.offset
        for field in layout.grads.fields
        for copy in COPIES
    ]
    lists = [ctypes.string_at(int(one["grads"]), 8 * int(one["num_replicas"])) for one in found]
    assert np.frombuffer(b"".join(lists), np.uint64).tolist() == need
    assert keep


def test_gradients_that_are_not_contiguous_are_refused(items):
    grads = {name: strided_rows(g) for name, g in zero_grads().items()}
    with pytest.raises(ValueError, match="home_grad: need contiguous memory"):
        items.reduced(Use(0, KEY, "plan", COPIES, (), q=0), grads)
