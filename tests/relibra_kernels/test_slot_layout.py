"""`SlotLayout`: offsets, views that overlap nowhere, and what it refuses."""

import pytest
import torch

from relibra_kernels.slot_layout import ALIGN_BYTES, SlotLayout

CPU = torch.device("cpu")
FIELDS = {
    "w13": (torch.bfloat16, (6, 100)),
    "w2": (torch.bfloat16, (100, 3)),
    "b13": (torch.bfloat16, (6,)),
    "scale": (torch.float32, ()),
    "none": (torch.float32, (0, 4)),
    "b2": (torch.float64, (100,)),
}


def test_offsets_are_aligned_and_in_order():
    layout = SlotLayout.of(FIELDS)
    assert [field.name for field in layout.fields] == list(FIELDS)
    assert [field.offset for field in layout.fields] == [0, 2048, 3072, 4096, 5120, 5120]
    assert [field.num_bytes for field in layout.fields] == [1200, 600, 12, 4, 0, 800]
    assert layout.slot_bytes == 6144
    assert all(field.offset % ALIGN_BYTES == 0 for field in layout.fields)


@pytest.mark.parametrize("num_slots", [0, 1, 3])
def test_views_cover_their_own_bytes_only(num_slots):
    layout = SlotLayout.of(FIELDS)
    buffer = layout.allocate(num_slots, CPU)
    views = layout.views(buffer)
    for number, (name, (dtype, shape)) in enumerate(FIELDS.items(), 1):
        assert views[name].dtype == dtype
        assert views[name].shape == (num_slots, *shape)
        views[name].fill_(number)
    for number, name in enumerate(FIELDS, 1):
        assert (views[name] == number).all()
    used = sum(field.num_bytes for field in layout.fields)
    assert int((buffer != 0).sum()) <= num_slots * used
    for view in views.values():
        for slot in view:
            assert slot.is_contiguous()
            slot.zero_()
    assert not buffer.any()


def test_gradients_have_the_same_fields_in_their_dtypes():
    layout = SlotLayout.of({name: FIELDS[name] for name in ("w13", "b13")})
    grads = layout.as_dtype({"w13": torch.float32, "b13": torch.float64})
    assert [(f.name, f.shape) for f in grads.fields] == [(f.name, f.shape) for f in layout.fields]
    assert [(f.dtype, f.offset) for f in grads.fields] == [
        (torch.float32, 0),
        (torch.float64, 3072),
    ]
    assert grads.slot_bytes == 4096


def test_slot_starts_are_aligned_in_memory_relative_to_the_buffer():
    layout = SlotLayout.of(FIELDS)
    buffer = layout.allocate(3, CPU)
    views = layout.views(buffer)
    for field in layout.fields:
        for slot in range(3):
            start = views[field.name][slot].data_ptr() - buffer.data_ptr()
            assert field.num_bytes == 0 or start == slot * layout.slot_bytes + field.offset


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda layout: SlotLayout.of({}), ValueError, "fields: need at least one"),
        (
            lambda layout: SlotLayout.of({"w": (torch.float32, (2, -1))}),
            ValueError,
            "shape of w: need",
        ),
        (lambda layout: layout.allocate(-1, CPU), ValueError, "num_slots: need"),
        (
            lambda layout: layout.views(torch.zeros(2, 1024)),
            TypeError,
            "buffer: need torch.uint8, got torch.float32",
        ),
        (
            lambda layout: layout.views(torch.zeros(2, 1000, dtype=torch.uint8)),
            ValueError,
            r"buffer: need a contiguous \[S, 1024\], got \[2, 1000\]",
        ),
        (
            lambda layout: layout.views(torch.zeros(4, 1024, dtype=torch.uint8)[::2]),
            ValueError,
            "buffer: need a contiguous",
        ),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(SlotLayout.of({"w": (torch.float32, (2,))}))
