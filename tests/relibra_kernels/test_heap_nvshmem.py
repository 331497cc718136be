"""NVSHMEM's life cycle over a stand-in for its bindings, and its bootstrap over the real ones.

No GPU here: what is tested is what ReLibra decides, not NVSHMEM's memory.
"""

import ctypes
import importlib.util
import logging
import os
import types

import pytest
import torch
import torch.distributed as dist
from lost_rank import survivors_tell

from relibra_kernels.errors import ReplicaSyncError
from relibra_kernels.testing.launch import run_ranks
from relibra_kernels.transport import nvshmem_library
from relibra_kernels.transport.heap_nvshmem import NvshmemHeap
from relibra_kernels.transport.nvshmem_library import NvshmemError, NvshmemLibrary

CPU = torch.device("cpu")
ID_BYTES = 128


class Struct:
    """A C struct of the bindings."""

    def __init__(self, content=b""):
        self._data = ctypes.create_string_buffer(content, ID_BYTES)
        self.ptr = ctypes.addressof(self._data)


class StatusError(Exception):
    """As the bindings raise a status: from Exception alone."""


class FakeBindings:
    """An NVSHMEM of one process; memory is ordinary memory, peers are far addresses."""

    Flags = types.SimpleNamespace(INIT_WITH_UNIQUEID=8)
    Team_id = types.SimpleNamespace(TEAM_NODE=2)
    uniqueid_dtype = types.SimpleNamespace(itemsize=ID_BYTES)
    uniqueid = InitAttr = Struct

    def __init__(self, version=(3, 8, 0), status=0, pe=0, size=0, after_init=2):
        self.version, self.status, self.pe, self.size = version, status, pe, size
        self.after_init, self.init_code, self.malloc_fails = after_init, 0, False
        self.blind_to, self.team_size, self.multicast = set(), 0, 0
        self.log, self.memory, self.environment = [], {}, {}

    def vendor_get_version_info(self, *addresses):
        for address, part in zip(addresses, self.version, strict=True):
            ctypes.c_int.from_address(address).value = part

    def init_status(self):
        return self.status

    def my_pe(self):
        return self.pe

    def n_pes(self):
        return self.size

    def get_uniqueid(self, address):
        self.log.append("get_uniqueid")
        ctypes.memmove(address, bytes(range(ID_BYTES)), ID_BYTES)

    def set_attr_uniqueid_args(self, rank, size, identity, attributes):
        self.identity = ctypes.string_at(identity, ID_BYTES)
        self.pe, self.size = rank, size

    def hostlib_init_attr(self, flags, attributes):
        self.log.append("init")
        self.environment = {k: v for k, v in os.environ.items() if k.startswith("NVSHMEM")}
        self.status = 1
        if self.init_code:
            raise StatusError(f"Status code {self.init_code}")
        self.status = self.after_init

    def malloc(self, nbytes):
        if self.malloc_fails:
            return 0
        made = ctypes.create_string_buffer(b"\1" * nbytes, nbytes)
        self.memory[ctypes.addressof(made)] = made
        return ctypes.addressof(made)

    def free(self, address):
        self.log.append("free")
        del self.memory[address]

    def ptr(self, address, pe):
        return 0 if pe in self.blind_to else address + (pe - self.pe) * 2**40

    def team_n_pes(self, team):
        return self.team_size

    def mc_ptr(self, team, address):
        return self.multicast

    def hostlib_finalize(self):
        self.log.append("finalize")
        self.status = 0


class Library(NvshmemLibrary):
    """Tensors on the CPU."""

    def tensor(self, address, nbytes, device):
        made = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(made, dtype=torch.uint8)


def heap_of(bindings, **options):
    return NvshmemHeap(dist.group.WORLD, CPU, library=Library(bindings), timeout_s=5, **options)


def on_two(body):
    return run_ranks(2, lambda rank, num_ranks: body(rank), timeout=30)


def refusal(heap):
    with pytest.raises(ReplicaSyncError) as caught:
        heap.alloc(4096, 1)
    return str(caught.value)


def test_a_new_instance_over_the_group():
    def body(rank):
        os.environ.pop("NVSHMEM_REMOTE_TRANSPORT", None)
        bindings = FakeBindings()
        heap = heap_of(bindings)
        arena = heap.alloc(4096, 3)
        assert not arena.base.any()
        assert (arena.nbytes, arena.generation, arena.multicast) == (4096, 3, None)
        assert arena.peers[1] - arena.peers[0] == 2**40
        assert arena.base.data_ptr() == arena.peers[rank] == next(iter(bindings.memory))
        assert bindings.identity == bytes(range(ID_BYTES))  # of rank 0, on both
        assert bindings.environment["NVSHMEM_REMOTE_TRANSPORT"] == "none"
        assert bindings.environment["NVSHMEM_DISABLE_NVLS"] == "1"
        assert "NVSHMEM_REMOTE_TRANSPORT" not in os.environ
        del arena
        heap.close()
        heap.close()
        heap.alloc(4096, 4)
        heap.close()
        assert bindings.memory == {}
        assert heap._library.finalize_own() is True
        assert heap._library.finalize_own() is False
        return bindings.log

    life = ["init", "free", "free", "finalize"]
    assert on_two(body) == [["get_uniqueid", *life], life]


def test_an_instance_of_somebody_else_is_used_and_never_finalized():
    def body(rank):
        bindings = FakeBindings(status=4, pe=1 - rank, size=2)  # PEs in another order
        heap = heap_of(bindings)
        arena = heap.alloc(4096, 1)
        assert arena.peers[1] - arena.peers[0] == -(2**40)
        assert heap._library.finalize_own() is False
        del arena
        heap.close()
        return bindings.log

    assert on_two(body) == [["free"], ["free"]]


def test_a_larger_instance_needs_the_users_word():
    def body(rank):
        bindings = FakeBindings(status=2, pe=6 + rank, size=8)
        told = refusal(heap_of(bindings))
        heap = heap_of(bindings, all_pes_allocate=True)
        arena = heap.alloc(4096, 1)
        assert arena.peers[1] - arena.peers[0] == 2**40
        heap.close(peers_alive=False)
        return told

    for told in on_two(body):
        assert "instance of this process has 8 PEs, the group 2 ranks" in told
        assert "pass all_pes_allocate=True" in told


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"after_init": 1}, "the initialisation returned, but NVSHMEM's init_status is 1 (need 2"),
        ({"status": 1}, "an earlier start failed, and a process has one only: NVSHMEM's init_st"),
    ],
)
def test_a_start_that_leaves_no_usable_instance(change, text):
    """3.4.5 returns normally from it."""

    def body(rank):
        bindings = FakeBindings(version=(3, 4, 5), **change)
        told = refusal(heap_of(bindings))
        assert bindings.memory == {}
        return told

    for told in on_two(body):
        assert "starting NVSHMEM: failed on rank(s) [0, 1] of 2; rank 0: NvshmemError: " in told
        assert text in told


def test_a_code_instead_of_an_exit_reaches_both_ranks():
    def body(rank):
        bindings = FakeBindings()
        bindings.init_code = 7 * rank
        return refusal(heap_of(bindings))

    for told in on_two(body):
        assert (
            "failed on rank(s) [1] of 2; rank 1: NvshmemError: nvshmemx_hostlib_init_attr" in told
        )
        assert "Status code 7" in told


def test_ranks_with_different_releases_or_states():
    def body(rank):
        releases = FakeBindings(version=(3, 4 + rank, 5))
        states = FakeBindings(status=2 * rank, size=2)
        return refusal(heap_of(releases)), refusal(heap_of(states))

    for release, state in on_two(body):
        assert "need the same release on all ranks, got rank 0: 3.4.5, rank 1: 3.5.5" in release
        assert "need the same instance on all ranks, got rank 0: none, rank 1: running" in state


def test_no_memory_and_no_peer_access():
    def body(rank):
        poor, blind = (FakeBindings(status=2, pe=rank, size=2) for _ in range(2))
        poor.malloc_fails = True
        blind.blind_to = {0} if rank else set()
        told = refusal(heap_of(poor)), refusal(heap_of(blind))
        assert blind.memory == {}  # given back by both
        assert (poor.log, blind.log) == ([], ["free"])
        return told

    for poor, blind in on_two(body):
        assert "nvshmem_malloc: no symmetric memory of 4096 bytes" in poor
        assert "failed on rank(s) [1] of 2; rank 1: NvshmemError: cpu has no peer acc" in blind
        assert "access to rank(s) [0]" in blind


def test_comm_04_no_multicast_is_plain_puts():
    def body(rank):
        found = []
        for address, team in ((0, 2), (2**45, 2), (2**45, 4)):
            bindings = FakeBindings(status=2, pe=rank, size=2)
            bindings.multicast, bindings.team_size = address, team
            heap = heap_of(bindings, multicast=True)
            found.append(heap.alloc(64, 1).multicast)
            heap.close()
        return found

    assert on_two(body) == [[None, 2**45, None]] * 2


def test_close_with_dead_peers_waits_for_nobody(tmp_path):
    """nvshmem_free would wait for ever."""

    def body(rank):
        bindings = FakeBindings(status=2, pe=rank, size=2)
        heap = heap_of(bindings)
        heap.alloc(64, 1)
        if rank == 1:
            return None
        heap._timeout_s = 0.3
        with pytest.raises(ReplicaSyncError) as caught:
            heap.close()
        heap.close()
        assert bindings.log == []
        return caught.value

    (told,) = survivors_tell(2, 1, body, tmp_path).values()
    assert told.startswith("close of an nvshmem arena: rank 0 of 2 waited 0.3 s"), told
    assert "rank(s) [1]" in told


def test_abandoned_memory_is_told(caplog):
    heap = NvshmemHeap(None, CPU, library=Library(FakeBindings(status=2, size=1)))
    heap.alloc(64, 1)
    with caplog.at_level(logging.WARNING):
        heap.close(peers_alive=False)
    assert "nvshmem: memory stays allocated" in caplog.text


@pytest.mark.parametrize("version", [(3, 4, 4), (2, 11, 0), (3, 9, 0), (4, 0, 0)])
def test_releases_that_are_not_supported(version):
    need = rf"need 3\.4\.5 to below 3\.9\.0, got {'.'.join(map(str, version))}: pip install"
    with pytest.raises(NvshmemError, match=need):
        Library(FakeBindings(version=version)).check_version()


def test_supported_releases():
    for version in ((3, 4, 5), (3, 5, 21), (3, 8, 0), (3, 8, 9)):
        Library(FakeBindings(version=version)).check_version()


def test_an_identity_of_another_length():
    with pytest.raises(NvshmemError, match="unique_id: need 128 bytes, got 64"):
        Library(FakeBindings()).initialize(0, 1, bytes(64), multicast=False)


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "ibrc")
    monkeypatch.setattr(nvshmem_library, "_initialized_here", False)
    bindings = FakeBindings()
    Library(bindings).initialize(0, 1, bytes(ID_BYTES), multicast=True)
    assert bindings.environment == {"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}
    assert os.environ["NVSHMEM_REMOTE_TRANSPORT"] == "ibrc"


def test_nothing_installed(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nvshmem_library.importlib, "import_module", missing)
    text = "NVSHMEM does not load .ModuleNotFoundError: No module named 'nvshmem.bind.*pip inst"
    with pytest.raises(NvshmemError, match=text):
        NvshmemLibrary.open()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "pip install nvshmem4py-cu13" in NvshmemHeap.why_not(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device" in NvshmemHeap.why_not(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("status", "ours", "text"),
    [
        (0, False, "nobody: loaded, init_status 0"),
        (1, False, "nobody: loaded, init_status 1"),
        (2, False, "other code in this process: PE 3 of 8"),
        (3, True, "ReLibra: PE 3 of 8"),
    ],
)
def test_who_owns_the_instance(monkeypatch, status, ours, text):
    host = types.SimpleNamespace(
        nvshmemx_init_status=lambda: status, nvshmem_my_pe=lambda: 3, nvshmem_n_pes=lambda: 8
    )
    monkeypatch.setattr(nvshmem_library, "loaded_path", lambda: "libnvshmem_host.so.3")
    monkeypatch.setattr(nvshmem_library.ctypes, "CDLL", lambda path: host)
    monkeypatch.setattr(nvshmem_library, "_initialized_here", ours)
    assert nvshmem_library.owner() == text


def bootstrap(rank, num_ranks):
    """Real NVSHMEM: PE numbers, then a clean error where there is no GPU."""
    os.environ["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] = "lo"
    told = refusal(NvshmemHeap(dist.group.WORLD, CPU, timeout_s=20))
    library = NvshmemLibrary.open()
    return library.my_pe(), library.n_pes(), library.status(), told, nvshmem_library.owner()


def test_bootstrap_of_the_real_library_over_gloo():
    if importlib.util.find_spec("nvshmem") is None:
        pytest.skip(f"NVSHMEM is not installed: {nvshmem_library.REMEDY}")
    if torch.cuda.is_available():
        pytest.skip("this test needs a machine without a GPU: with one, NVSHMEM starts")
    results = run_ranks(2, bootstrap, timeout=60)
    assert [result[:3] for result in results] == [(0, 2, 1), (1, 2, 1)]
    for *_, told, who in results:
        assert "starting NVSHMEM: failed on rank(s) [0, 1] of 2" in told
        assert who == "nobody: loaded, init_status 1"


@pytest.mark.gpu
def test_one_pe_on_one_gpu(tmp_path):
    if importlib.util.find_spec("nvshmem") is None:
        pytest.skip(f"NVSHMEM is not installed: {nvshmem_library.REMEDY}")
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        heap = NvshmemHeap(dist.group.WORLD, torch.device("cuda", 0))
        for generation in (1, 2):
            arena = heap.alloc(2**20, generation)
            assert not arena.base.any()
            arena.base.fill_(generation)
            assert int(arena.base[-1]) == generation
            assert arena.peers == (arena.base.data_ptr(),)
            del arena
            heap.close()
    finally:
        dist.destroy_process_group()
