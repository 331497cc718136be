"""Launch data that tables carry: made once, found by the ops, and never wrong after a change."""

import pytest
import torch

from relibra_kernels.ops import gemm_launch
from relibra_kernels.ops.gemm_launch import tile_count, weight_set
from relibra_kernels.ops.launch_data import (
    REPLICA_BUFFERS,
    LaunchData,
    WeightCache,
    WgradShape,
    _packed,
    attach,
    launch_data,
    uploaded,
)
from relibra_kernels.tables import m_tiles, w_tiles

ROWS = torch.tensor([5, 0, 3], dtype=torch.int32)
BLOCK = 4
SHAPE = WgradShape(2, 0, BLOCK, 6, 3, True)


def use(cache=None):
    rows = ROWS.clone()
    tiles = m_tiles(rows, 2, BLOCK)
    data = LaunchData(tiles, rows, cache)
    attach(data, tiles, rows)
    return data, tiles, rows


def test_the_number_of_tiles_is_made_once():
    data, tiles, _ = use()
    assert tile_count(tiles, tiles.device) is data.num_tiles
    assert data.num_tiles.tolist() == [len(tiles)]
    bare = m_tiles(ROWS, 2, BLOCK)
    assert tile_count(bare, bare.device).tolist() == [len(bare)]
    meta = torch.device("meta")
    assert tile_count(tiles, meta).device == meta, "data of another device are of no use"


def test_an_op_finds_the_data_of_its_tables():
    seen = []

    @torch.library.custom_op("relibra_test::reads_launch_data", mutates_args=())
    def reads(table: torch.Tensor) -> torch.Tensor:
        seen.append(launch_data(table))
        return table.clone()

    data, tiles, rows = use()
    reads(tiles), reads(rows), reads(rows.clone())
    assert seen == [data, data, None]


def test_weight_gradient_tiles_are_made_once_and_then_with_the_tables():
    cache = WeightCache()
    data, _, rows = use(cache)
    tiles, count = data.wtile(rows, SHAPE)
    assert torch.equal(tiles, w_tiles(ROWS, *SHAPE))
    assert count.tolist() == [len(tiles)]
    assert data.wtile(rows, SHAPE)[0] is tiles
    later, _, rows = use(cache)  # the next use of the layer has them from the start
    assert len(later.tensors()) == 4
    assert torch.equal(later.wtile(rows, SHAPE)[0], tiles)
    single = SHAPE._replace(tiles13=0)
    third = SHAPE._replace(tiles2=0)
    for shape in (single, third, single):
        cache.note_wgrad(shape)
    assert cache.wgrad_shapes == [third, single], "bounded, the newest last"


def test_shapes_of_a_plan_with_more_static_slots_are_left_out():
    cache = WeightCache()
    fitting, larger = SHAPE._replace(num_static=1), SHAPE._replace(num_static=2)
    for shape in (fitting, larger):
        cache.note_wgrad(shape)
    data, _, rows = use(cache)
    assert len(data.tensors()) == 4, "the tiles of one shape"
    assert torch.equal(data.wtile(rows, fitting)[0], w_tiles(ROWS, *fitting))
    with pytest.raises(ValueError, match="num_static: need 0 to 1, got 2"):
        data.wtile(rows, larger)


def test_tables_that_changed_carry_nothing():
    data, tiles, rows = use()
    assert data.padded_rows(rows, BLOCK) == 12
    assert launch_data(rows) is data
    rows[0] += 1
    assert launch_data(rows) is None
    tiles.resize_(1, 4)
    assert launch_data(tiles) is None


def test_data_of_inference_tensors_are_not_trusted():
    with torch.inference_mode():
        _, tiles, rows = use()
        assert launch_data(rows) is None
        assert launch_data(tiles) is not None


def field(cache_of, home, replica=None, **options):
    return weight_set([home], None, replica, 1, tiles=cache_of, **options)


def test_weights_are_remembered_until_one_of_them_moves():
    cache = WeightCache()
    _, tiles, _ = use(cache)
    home, replica = torch.zeros(2, 4, 8), torch.zeros(1, 4, 8)
    first = field(tiles, home, replica)
    assert field(tiles, home, replica) is first
    assert field(tiles, home, replica, transposed=True) is not first
    assert cache.num_made == 2
    home.data = home.data.clone()  # an optimizer, an offload, FSDP
    moved = field(tiles, home, replica)
    assert moved is not first
    assert field(tiles, home, replica) is moved
    assert field(tiles, home, replica.clone()) is not moved
    assert len(cache) == 2, "an older address of the same field is forgotten"


def test_replica_buffers_that_alternate_share_a_field_until_home_moves():
    cache = WeightCache()
    _, tiles, _ = use(cache)
    home, buffers = torch.zeros(2, 4, 8), torch.zeros(2, 1, 4, 8)
    fields = [field(tiles, home, buffers[i % 2]) for i in range(6)]
    assert [one is fields[i % 2] for i, one in enumerate(fields)] == [True] * 6
    assert fields[0].replica.data_ptr() != fields[1].replica.data_ptr()
    assert (cache.num_made, len(cache)) == (2, 1)
    home.data = home.data.clone()
    assert field(tiles, home, buffers[0]) is not fields[0]
    assert field(tiles, home, buffers[1]) is not fields[1]
    for _ in range(2 * REPLICA_BUFFERS):
        field(tiles, home, torch.zeros(1, 4, 8))
    (_, by_buffer) = next(iter(cache._known.values()))
    assert len(by_buffer) <= REPLICA_BUFFERS


def test_what_is_packed_for_one_copy_starts_on_128_byte_boundaries():
    tensors = [torch.arange(n, dtype=torch.int32) + n for n in (3, 0, 32, 33)]
    tensors.append(torch.arange(8, dtype=torch.int32).view(4, 2).t())
    packed, sizes = _packed(tensors, pin_memory=False)
    assert sizes == [32, 0, 32, 64, 32]
    for part, one in zip(packed.split(sizes), tensors, strict=True):
        assert torch.equal(part[: one.numel()].view(one.shape), one)
    on_meta = torch.zeros(5, device="meta")
    found = uploaded([tensors[0], on_meta, tensors[4]], torch.device("meta"))
    assert [x.shape for x in found] == [(3,), (5,), (2, 4)]
    assert found[1] is on_meta


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.as_strided((2, 4, 4), w.stride()),
        lambda w: w.as_strided(tuple(w.shape), (64, 16, 1)),
        lambda w: w.view(torch.int32).view(torch.float32)[:1],
        lambda w: w.half(),
    ],
)
def test_the_same_address_with_another_layout_is_another_field(change):
    _, tiles, _ = use(WeightCache())
    home = torch.zeros(4, 16, 16)[:2, :4, :8]
    assert field(tiles, change(home)) is not field(tiles, home)


def test_one_of_several_experts_that_moves_is_noticed():
    cache = WeightCache()
    _, tiles, _ = use(cache)
    experts = [torch.zeros(4, 8) for _ in range(3)]

    def get():
        return weight_set(experts, None, None, 1, tiles=tiles)

    first = get()
    assert get() is first
    experts[1].data = torch.ones(4, 8)
    assert get() is not first
    assert torch.equal(get().home[1], torch.ones(4, 8))


def test_the_number_of_fields_is_bounded_and_clear_lets_go():
    cache = WeightCache(limit=3)
    _, tiles, _ = use(cache)
    for width in range(8, 48, 8):
        field(tiles, torch.zeros(2, 4, width))
    assert len(cache) == 3
    cache.clear()
    assert len(cache) == 0


def test_without_a_cache_every_call_makes_its_own():
    _, tiles, _ = use()
    home = torch.zeros(2, 4, 8)
    assert field(tiles, home) is not field(tiles, home)
    assert gemm_launch.weight_set([home], None, None, 1).home is home
