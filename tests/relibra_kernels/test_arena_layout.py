"""Every part of an arena has its own bytes, aligned, and the report adds up."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra_kernels.slot_layout import SlotLayout
from relibra_kernels.transport.arena_layout import PARTS, WORD_LINE_BYTES, ArenaLayout

SHAPES = {"w13": (6, 100), "w2": (50, 6), "b13": (6,)}


def layout_of(num_ranks=4, num_slots=2, weight_buffers=2, grad_buffers=2):
    weights = SlotLayout.of({name: (torch.bfloat16, shape) for name, shape in SHAPES.items()})
    grads = weights.as_dtype(dict.fromkeys(SHAPES, torch.float32))
    return ArenaLayout(weights, grads, num_ranks, num_slots, weight_buffers, grad_buffers)


def ranges_of(layout):
    """(start, bytes) of every slot and word, in the order of the parts."""
    slots, ranks = range(layout.num_slots), range(layout.num_ranks)
    weights, grads = range(layout.weight_buffers), range(layout.grad_buffers)
    pairs = itertools.product
    return [
        *((layout.weight_slot(w, s), layout.weights.slot_bytes) for w, s in pairs(weights, slots)),
        *((layout.grad_slot(g, s), layout.grads.slot_bytes) for g, s in pairs(grads, slots)),
        *((layout.full(w, s), WORD_LINE_BYTES) for w, s in pairs(weights, slots)),
        *((layout.grad_ready(*at), WORD_LINE_BYTES) for at in pairs(grads, ranks, slots)),
        *((layout.retired(p), WORD_LINE_BYTES) for p in ranks),
        *((layout.grad_retired(p), WORD_LINE_BYTES) for p in ranks),
        (layout.abort, WORD_LINE_BYTES),
    ]


@given(st.integers(1, 8), st.integers(0, 3), st.integers(2, 3), st.integers(1, 3))
@settings(max_examples=40)
def test_parts_follow_each_other_without_holes_or_overlap(num_ranks, num_slots, buffers, grads):
    layout = layout_of(num_ranks, num_slots, buffers, grads)
    end = 0
    for start, nbytes in ranges_of(layout):
        assert start == end
        end = start + nbytes
    assert end <= layout.nbytes < end + 1024
    assert layout.nbytes % 1024 == 0
    for start, nbytes in ranges_of(layout):
        assert start % (1024 if nbytes > WORD_LINE_BYTES else WORD_LINE_BYTES) == 0


def test_worked_example():
    """w13 2048, w2 1024, b13 1024 bytes in bf16; 3072, 2048, 1024 in fp32."""
    layout = layout_of()
    assert (layout.weights.slot_bytes, layout.grads.slot_bytes) == (4096, 6144)
    assert layout.weight_slot(1, 1) == 3 * 4096
    assert layout.grad_slot(1, 0) == 4 * 4096 + 2 * 6144
    words = 4 * 4096 + 4 * 6144
    assert layout.full(0, 1) == words + 128
    assert layout.grad_ready(1, 2, 1) == words + 4 * 128 + (1 * 8 + 2 * 2 + 1) * 128
    assert layout.retired(3) == words + (4 + 16 + 3) * 128
    assert layout.grad_retired(0) == words + (4 + 16 + 4) * 128
    assert layout.abort == words + (4 + 16 + 8) * 128


def test_the_report_comes_before_any_allocation():
    layout = layout_of()
    report = layout.report(granule_bytes=2**21)
    assert list(report) == [*PARTS, "total", "reserved"]
    assert report["weight_slot"] == 2 * 2 * 4096
    assert report["grad_ready"] == 2 * 4 * 2 * 128
    assert sum(report[part] for part in PARTS) <= report["total"] == layout.nbytes
    assert report["reserved"] == 2**21


def test_published_size_of_a_replica_slot():
    """Qwen3-30B, S = 1: 19 MB of weights and 38 MB of gradients."""
    shapes = {"w13": (2 * 768, 2048), "w2": (2048, 768)}
    weights = SlotLayout.of({name: (torch.bfloat16, shape) for name, shape in shapes.items()})
    grads = weights.as_dtype(dict.fromkeys(shapes, torch.float32))
    report = ArenaLayout(weights, grads, 8, 1).report()
    assert (round(report["weight_slot"] / 1e6), round(report["grad_slot"] / 1e6)) == (19, 38)
    assert report["weight_slot"] == 2 * 6 * 768 * 2048


def test_views_lie_at_the_offsets():
    layout = layout_of(num_slots=3)
    base = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for buffer, make, start in (
        (1, layout.weight_views, layout.weight_slot),
        (0, layout.grad_views, layout.grad_slot),
    ):
        fields = layout.weights if make == layout.weight_views else layout.grads
        views = make(base, buffer)
        assert {name: tuple(view.shape[1:]) for name, view in views.items()} == SHAPES
        for field, slot in itertools.product(fields.fields, range(3)):
            view = views[field.name][slot]
            assert view.dtype == field.dtype
            assert view.data_ptr() == base.data_ptr() + start(buffer, slot) + field.offset
            view.fill_(1)
    assert not base[layout.full(0, 0) :].any()


def test_no_slots():
    layout = layout_of(num_slots=0)
    assert layout.abort == 2 * 4 * 128
    base = torch.zeros(layout.nbytes, dtype=torch.uint8)
    assert layout.weight_views(base, 1)["w13"].shape == (0, 6, 100)


@pytest.mark.parametrize(
    ("name", "index"),
    [("weight_slot", (2, 0)), ("weight_slot", (0, 2)), ("grad_slot", (-1, 0)), ("full", (0, -1)),
     ("grad_ready", (0, 4, 0)), ("grad_ready", (0, 0, 2)), ("retired", (4,)),
     ("grad_retired", (-1,))],
)  # fmt: skip
def test_an_index_out_of_range_is_nobodys_memory(name, index):
    with pytest.raises(IndexError, match="index: need below"):
        getattr(layout_of(), name)(*index)


def test_rejected_sizes():
    for wrong in ({"num_ranks": 0}, {"num_slots": -1}, {"weight_buffers": 1}, {"grad_buffers": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            layout_of(**wrong)
    layout = layout_of()
    other = SlotLayout.of({"w13": (torch.float32, (6, 100))})
    with pytest.raises(ValueError, match="grads: need the fields"):
        dataclasses.replace(layout, grads=other)
    base = torch.zeros(layout.nbytes - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"base: need {layout.nbytes} bytes"):
        layout.weight_views(base, 0)
    with pytest.raises(IndexError):
        layout.weight_views(torch.zeros(layout.nbytes, dtype=torch.uint8), 2)


def test_the_digest_tells_layouts_apart():
    layouts = [layout_of(), layout_of(8), layout_of(num_slots=1), layout_of(grad_buffers=1)]
    grads = layouts[0].grads.as_dtype(dict.fromkeys(SHAPES, torch.bfloat16))
    layouts.append(dataclasses.replace(layouts[0], grads=grads))
    assert len({layout.digest() for layout in layouts}) == len(layouts)
    assert layout_of().digest() == layouts[0].digest()
