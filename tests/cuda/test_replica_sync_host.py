"""The bodies of replica synchronisation on the CPU, each against NumPy, with their error paths."""

import ctypes
import threading
import time

import numpy as np
import pytest
import torch
from sync_memory import Memory, address, items, ring

from relibra_kernels import native
from relibra_kernels.transport import sync_types as st
from relibra_kernels.transport.sync_types import ErrorCode, ReduceKind, SyncOp

SECOND = 10**9
GRIDS = [(1, 1), (1, 3), (3, 1), (2, 4)]


def wait_for(memory: Memory, *rows: tuple[int, ...], timeout_s: float = 5.0, use: int = 7) -> int:
    return native.replica_sync().wait(
        items(st.WAIT_ITEM, *rows), use, SyncOp.WEIGHTS, int(timeout_s * SECOND), memory.fault
    )


def record_of(memory: Memory) -> dict[str, int]:
    return {name: int(memory.record[name][0]) for name in st.ERROR_RECORD.names}


# --- structs and words ----------------------------------------------------------------------------


def test_the_library_is_of_the_version_that_python_expects() -> None:
    module = native.replica_sync()
    assert module.rs_abi_version() == st.ABI_VERSION
    assert ctypes.CDLL(module.__file__).rs_abi_version() == st.ABI_VERSION


def test_the_dtypes_have_the_sizes_of_the_c_structs() -> None:
    sizes = {"WAIT_ITEM": 32, "PUSH_ITEM": 48, "PUBLISH_ITEM": 16, "REDUCE_ITEM": 32}
    sizes |= {"ERROR_RECORD": 48, "FAULT": 40}
    assert {name: getattr(st, name).itemsize for name in sizes} == sizes
    for name in sizes:  # the compiler's padding, if it added any
        assert np.dtype(getattr(st, name).descr, align=True).itemsize == sizes[name]


def test_a_word_orders_by_generation_then_use_and_differs_by_hash() -> None:
    words = [
        st.pack_word(g, n, h) for g in (0, 1, 65535) for n in (0, 1, 2**32 - 2) for h in (0, 9)
    ]
    assert words == sorted(words)
    assert len(set(words)) == len(words)
    assert all(0 < word < 2**64 for word in words)
    assert st.unpack_word(words[-1]) == (65535, 2**32 - 2, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((65536, 0, 0), "generation: need 0 to 65535, got 65536"),
        ((0, 2**32 - 1, 0), "n: need 0 to 4294967294, got 4294967295"),
        ((0, -1, 0), "n: need 0 to 4294967294, got -1"),
        ((0, 0, 65536), "hash16: need 0 to 65535, got 65536"),
    ],
)
def test_a_part_of_a_word_out_of_range_is_named(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        st.pack_word(*arguments)
    with pytest.raises(ValueError, match="count: need 0 to 281474976710655, got 281474976710656"):
        st.pack_credit(0, 2**48)


def test_the_hash_depends_on_every_part_of_the_key_the_expert_and_the_plan() -> None:
    key = ("policy", 3, 0, 1, 7, "forward")
    others = [("critic", *key[1:]), (*key[:1], 4, *key[2:]), (*key[:5], "backward")]
    values = {st.hash16(k, 5, "plan") for k in [key, *others]}
    values |= {st.hash16(key, 6, "plan"), st.hash16(key, 5, "other")}
    assert len(values) == 6
    assert st.hash16(key, 5, "plan") == 41808  # the same in every process and release


# --- push -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "threads"), GRIDS)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 64, 100, 4096, 5003])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "odd-address"])
def test_push_copies_every_byte_and_no_other(
    blocks: int, threads: int, size: int, shift: int
) -> None:
    memory = Memory()
    source = np.random.default_rng(size).integers(0, 256, 6000, dtype=np.uint8)
    target = np.full(6000, 99, np.uint8)
    item = (address(source) + shift, address(target) + 16, size, memory.word(2), 77)
    pushed = items(st.PUSH_ITEM, (*item, memory.arrival(0)))
    assert native.replica_sync().push(pushed, memory.fault, blocks, threads) == 0
    assert np.array_equal(target[16 : 16 + size], source[shift : shift + size])
    assert (target[:16] == 99).all()
    assert (target[16 + size :] == 99).all()
    assert memory.words.tolist() == [0, 0, 77] + [0] * 61
    assert not memory.arrivals.any(), "ready for the next launch"


@pytest.mark.parametrize(("blocks", "threads"), GRIDS)
def test_push_of_several_fields_stores_the_word_of_the_last_one(blocks: int, threads: int) -> None:
    memory = Memory()
    source = np.arange(3 * 1000, dtype=np.float32).reshape(3, 1000)
    target = np.zeros_like(source)
    rows = [(address(s), address(t), 4000, 0, 0, 0) for s, t in zip(source, target, strict=True)]
    rows[2] = (*rows[2][:3], memory.word(0), 5, memory.arrival(0))
    native.replica_sync().push(items(st.PUSH_ITEM, *rows), memory.fault, blocks, threads)
    assert np.array_equal(source, target)
    assert memory.words[0] == 5


# --- reduce ---------------------------------------------------------------------------------------

KINDS = {
    ReduceKind.FP32_FROM_FP32: (np.float32, np.float32),
    ReduceKind.FP32_FROM_BF16: (np.float32, np.uint16),
    ReduceKind.FP64_FROM_FP64: (np.float64, np.float64),
}


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("blocks", "threads"), GRIDS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("count", [0, 1, 3, 8, 9, 1000, 1003])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "odd-element"])
def test_reduce_adds_in_list_order_bit_for_bit(
    blocks: int, threads: int, kind: ReduceKind, count: int, shift: int
) -> None:
    """Values of very different size, so that another order gives other bits."""
    home_type, _ = KINDS[kind]
    rng = np.random.default_rng(count)
    values = (rng.normal(size=(4, 1100)) * 10.0 ** rng.integers(-6, 6, (4, 1100))).astype(home_type)
    home = values[0].copy()
    grads = [bf16_bits(v) if kind == ReduceKind.FP32_FROM_BF16 else v for v in values[1:]]
    pointers = np.array([address(grad) for grad in grads], np.uint64)
    item = (address(home) + shift * home.itemsize, address(pointers), 3, kind, count)
    native.replica_sync().reduce(items(st.REDUCE_ITEM, item), Memory().fault, blocks, threads)
    expected = values[0].copy()
    for grad in grads:
        wide = widened(grad) if kind == ReduceKind.FP32_FROM_BF16 else grad
        expected[shift : shift + count] += wide[:count]
    assert np.array_equal(home, expected)


def test_another_order_would_give_other_bits() -> None:
    """The test above can fail: its values do not commute."""
    results = []
    for order in ([0, 1, 2], [2, 1, 0]):
        grads = [np.full(8, value, np.float32) for value in (1.0, 1e8, -1e8)]
        home = np.zeros(8, np.float32)
        pointers = np.array([address(grads[i]) for i in order], np.uint64)
        item = (address(home), address(pointers), 3, ReduceKind.FP32_FROM_FP32, 8)
        native.replica_sync().reduce(items(st.REDUCE_ITEM, item), Memory().fault)
        results.append(home[0])
    assert results == [0.0, 1.0]


# --- publish and wait -----------------------------------------------------------------------------


def test_publish_stores_every_value() -> None:
    memory = Memory()
    rows = [(memory.word(i), 100 + i) for i in range(5)]
    assert native.replica_sync().publish(items(st.PUBLISH_ITEM, *rows), memory.fault) == 0
    assert memory.words[:6].tolist() == [100, 101, 102, 103, 104, 0]
    loaded = native.replica_sync().load_words(np.array([row[0] for row in rows], np.uint64))
    assert loaded.tolist() == [100, 101, 102, 103, 104]


def test_wait_ends_when_another_thread_publishes_and_does_not_hold_the_gil() -> None:
    memory = Memory()
    word = st.pack_word(1, 7, 0xBEEF)

    def publish_late() -> None:
        time.sleep(0.05)
        native.replica_sync().publish(items(st.PUBLISH_ITEM, (memory.word(3), word)), memory.fault)

    thread = threading.Thread(target=publish_late)
    started = time.monotonic()
    thread.start()
    assert wait_for(memory, (memory.word(3), st.pack_word(1, 7, 0), word, 1, 0)) == 0
    assert 0.04 < time.monotonic() - started < 4
    thread.join()
    assert record_of(memory)["code"] == 0


def test_a_later_credit_satisfies_a_wait() -> None:
    memory = Memory()
    memory.words[0] = st.pack_credit(1, 9)
    assert wait_for(memory, (memory.word(0), st.pack_credit(1, 4), 0, 1, -1)) == 0


@pytest.mark.parametrize("generation", [0, 1, 3, 65535])
def test_a_word_of_another_generation_reads_as_not_yet(generation: int) -> None:
    memory = Memory(generation=2)
    memory.words[0] = st.pack_credit(generation, 2**40)
    code = wait_for(memory, (memory.word(0), st.pack_credit(2, 1), 0, 1, -1), timeout_s=0.02)
    assert code == ErrorCode.TIMEOUT


def test_a_time_out_is_recorded_and_told_to_every_rank() -> None:
    ranks = ring(3, generation=4)
    memory = ranks[1]
    memory.words[5] = st.pack_word(4, 5, 0x11)
    expected = st.pack_word(4, 7, 0x22)
    started = time.monotonic()
    item = (memory.word(5), st.pack_word(4, 7, 0), expected, 2, 6)
    assert wait_for(memory, item, timeout_s=0.1) == ErrorCode.TIMEOUT
    assert 0.1 <= time.monotonic() - started < 2
    assert record_of(memory) == {
        "code": ErrorCode.TIMEOUT,
        "rank": 1,
        "op": SyncOp.WEIGHTS,
        "peer": 2,
        "slot": 6,
        "reserved": 0,
        "use": 7,
        "expected": expected,
        "observed": st.pack_word(4, 5, 0x11),
    }
    said = [st.unpack_word(rank.abort[0]) for rank in ranks]
    assert said == [(4, 1, ErrorCode.TIMEOUT)] * 3
    assert [record_of(rank)["code"] for rank in ranks] == [0, 1, 0]


def test_the_time_out_covers_a_call_and_not_each_word() -> None:
    """Words that arrive one by one, each just in time, do not stretch the wait."""
    memory = Memory()
    rows = [(memory.word(i), st.pack_credit(1, 1), 0, 0, i) for i in range(8)]

    def publish_slowly() -> None:
        for i in range(8):
            time.sleep(0.08)
            native.replica_sync().publish(
                items(st.PUBLISH_ITEM, (memory.word(i), st.pack_credit(1, 1))), memory.fault
            )

    thread = threading.Thread(target=publish_slowly)
    thread.start()
    assert wait_for(memory, *rows, timeout_s=0.2) == ErrorCode.TIMEOUT
    thread.join()
    assert 0 < record_of(memory)["slot"] < 7


def test_a_word_of_another_plan_is_a_mismatch_at_once() -> None:
    ranks = ring(2)
    observed = st.pack_word(1, 7, 0x5555)
    ranks[0].words[0] = observed
    expected = st.pack_word(1, 7, 0x4444)
    started = time.monotonic()
    item = (ranks[0].word(0), st.pack_word(1, 7, 0), expected, 1, 3)
    assert wait_for(ranks[0], item, timeout_s=30) == ErrorCode.MISMATCH
    assert time.monotonic() - started < 2
    found = record_of(ranks[0])
    assert (found["code"], found["peer"], found["slot"], found["use"]) == (2, 1, 3, 7)
    assert (found["expected"], found["observed"]) == (expected, observed)
    assert st.unpack_word(ranks[1].abort[0]) == (1, 0, ErrorCode.MISMATCH)


def test_a_word_of_a_later_use_is_a_mismatch_not_an_arrival() -> None:
    memory = Memory()
    memory.words[0] = st.pack_word(1, 9, 0x4444)
    item = (memory.word(0), st.pack_word(1, 7, 0), st.pack_word(1, 7, 0x4444), 1, 3)
    assert wait_for(memory, item) == ErrorCode.MISMATCH


def test_an_abort_of_a_peer_ends_a_wait_and_names_the_peer() -> None:
    ranks = ring(3)
    threading.Timer(
        0.05, lambda: native.replica_sync().report(ranks[2].fault, ErrorCode.TIMEOUT, 4, 11)
    ).start()
    started = time.monotonic()
    item = (ranks[0].word(0), st.pack_credit(1, 1), 0, 1, 3)
    assert wait_for(ranks[0], item, timeout_s=30) == ErrorCode.PEER_ABORTED
    assert time.monotonic() - started < 5
    found = record_of(ranks[0])
    assert (found["code"], found["rank"], found["peer"]) == (3, 0, 2)
    assert record_of(ranks[1])["code"] == 0
    assert st.unpack_word(ranks[1].abort[0]) == (1, 2, ErrorCode.TIMEOUT)


def test_an_abort_of_another_generation_is_ignored() -> None:
    memory = Memory(generation=2)
    memory.abort[0] = st.pack_word(1, 0, ErrorCode.TIMEOUT)
    item = (memory.word(0), st.pack_credit(2, 1), 0, 1, 3)
    assert wait_for(memory, item, timeout_s=0.05) == ErrorCode.TIMEOUT


def test_the_first_error_stays_in_the_record() -> None:
    memory = Memory()
    native.replica_sync().report(memory.fault, ErrorCode.MISMATCH, 2, 5, 1, 2, 3, 4)
    native.replica_sync().report(memory.fault, ErrorCode.TIMEOUT, 3, 6, 7, 8, 9, 10)
    assert list(memory.record[0]) == [ErrorCode.MISMATCH, 0, 2, 1, 2, 0, 5, 3, 4]
    assert native.replica_sync().load_code(address(memory.record)) == ErrorCode.MISMATCH
    memory.words[0] = st.pack_credit(1, 1)
    code = wait_for(memory, (memory.word(0), st.pack_credit(1, 1), 0, 1, 3))
    assert code == ErrorCode.MISMATCH, "a wait that would succeed still says that the rank failed"


@pytest.mark.parametrize(("blocks", "threads"), GRIDS)
def test_nothing_is_written_after_an_abort(blocks: int, threads: int) -> None:
    memory = Memory()
    native.replica_sync().report(memory.fault, ErrorCode.TIMEOUT, 1, 0)
    source, target = np.ones(100, np.float32), np.zeros(100, np.float32)
    pointers = np.array([address(source)], np.uint64)
    row = (address(source), address(target), 400, memory.word(0), 9, memory.arrival(0))
    module = native.replica_sync()
    assert module.push(items(st.PUSH_ITEM, row), memory.fault, blocks, threads) == 0
    summed = items(st.REDUCE_ITEM, (address(target), address(pointers), 1, 0, 100))
    assert module.reduce(summed, memory.fault, blocks, threads) == 0
    assert module.publish(items(st.PUBLISH_ITEM, (memory.word(1), 9)), memory.fault) == 0
    assert not target.any()
    assert not memory.words.any()


def test_an_abort_of_another_generation_stops_no_call() -> None:
    memory = Memory(generation=2)
    memory.abort[0] = st.pack_word(1, 0, ErrorCode.TIMEOUT)
    source, target = np.ones(100, np.float32), np.zeros(100, np.float32)
    pointers = np.array([address(source)], np.uint64)
    module = native.replica_sync()
    row = (address(source), address(target), 400, memory.word(0), 9, memory.arrival(0))
    module.push(items(st.PUSH_ITEM, row), memory.fault)
    summed = items(st.REDUCE_ITEM, (address(target), address(pointers), 1, 0, 100))
    module.reduce(summed, memory.fault)
    module.publish(items(st.PUBLISH_ITEM, (memory.word(1), 9)), memory.fault)
    assert (target == 2).all()
    assert memory.words[:2].tolist() == [9, 9]


# --- rejected input -------------------------------------------------------------------------------


def test_arrays_of_another_shape_are_refused() -> None:
    module, memory = native.replica_sync(), Memory()
    with pytest.raises(
        TypeError, match="items: .*items of 48 bytes, got 1 axes, items of 32 bytes"
    ):
        module.push(np.zeros(2, st.WAIT_ITEM), memory.fault)
    with pytest.raises(TypeError, match="items: .*items of 16 bytes, got 2 axes"):
        module.publish(np.zeros((2, 2), st.PUBLISH_ITEM), memory.fault)
    with pytest.raises(TypeError, match="items: need a C-contiguous"):
        module.wait(np.zeros(4, st.WAIT_ITEM)[::2], 0, 1, 1, memory.fault)
    with pytest.raises(TypeError, match="fault: need 1 item, got 2"):
        module.reduce(np.zeros(1, st.REDUCE_ITEM), np.zeros(2, st.FAULT))


def test_values_that_no_call_can_use_are_refused() -> None:
    module, memory = native.replica_sync(), Memory()
    none = np.zeros(0, st.PUSH_ITEM)
    assert module.push(none, memory.fault) == 0
    for blocks, threads in [(0, 1), (1, 0), (-1, -1), (257, 1), (16, 17)]:
        with pytest.raises(ValueError, match="push: need .*blocks x threads <= 256"):
            module.push(none, memory.fault, blocks, threads)
    with pytest.raises(ValueError, match="push: need a fault"):
        module.push(none, np.zeros(1, st.FAULT))
    with pytest.raises(ValueError, match="arrivals with every full"):
        module.push(items(st.PUSH_ITEM, (0, 0, 0, memory.word(0), 1, 0)), memory.fault)
    with pytest.raises(ValueError, match="kind 0..2"):
        module.reduce(items(st.REDUCE_ITEM, (0, 0, 0, 3, 0)), memory.fault)
    with pytest.raises(ValueError, match="code: need 1..99, got 0"):
        module.report(memory.fault, 0, 1, 1)
