"""The index tables of a training step: built one layer ahead, in memory that steps reuse.

Tables of all uses of a step would take gigabytes, so a use of a layer has its tables from the
forward before it (or its own) until its backward. While a layer runs, the tables of the next MoE
layer of the same use are built on a side stream, the exchange of their rows included; every rank
does so at the same place of its order of uses. Nothing is built ahead where the next layer is not
certain: after the last layer, in a recomputation, and for live routes, whose ids nobody has yet.

On CUDA, events order the streams: a set is written after the last reader of its memory, and read
after its builder. On the CPU the same code runs without streams.

Letters: T tokens here, K choices, V tokens sent, U tokens received, R rows computed here, B tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from relibra.rank_tables import LayerTables
from relibra_kernels.ops.launch_data import LaunchData, WeightCache, attach
from relibra_kernels.tables import count_padded_rows
from relibra_kernels.thread_state import keeps_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from relibra.rank_tables import SourceRoute

ALIGN_BYTES = 128  # of every table
HOST_TABLES = ("slot_rows_n", "push_list", "pull_list")  # read by the host, never by a kernel

Key = tuple[str, int, int]  # pass, micro-batch, place among the MoE layers


class Streams(Protocol):
    """Streams and events of one device."""

    def side(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to the side stream, which becomes the current one."""

    def record(self) -> Any:
        """An event after all that the current stream was given so far."""

    def wait(self, event: Any) -> None:
        """The current stream goes on after the event; None waits for nothing."""


class HostOrder:
    """The CPU: everything happens in the order of the program."""

    def side(self) -> contextlib.AbstractContextManager[Any]:
        """The only stream there is."""
        return contextlib.nullcontext()

    def record(self) -> Any:
        """Nothing to wait for."""
        return None

    def wait(self, event: Any) -> None:
        """Nothing to wait for."""


class CudaStreams:
    """A CUDA device; the side stream is made once.

    Args:
        device: with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._side = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def side(self) -> contextlib.AbstractContextManager[Any]:
        """The side stream."""
        stream: contextlib.AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return stream

    def record(self) -> Any:
        """An event of the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: Any) -> None:
        """Orders the current stream after an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def streams_of(device: torch.device) -> Streams:
    """Streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostOrder()


@dataclasses.dataclass
class TableSet:
    """Memory of the tables of one use of one layer.

    Attributes:
        memory: uint8, starts on a 128-byte boundary.
        free: event of the stream that last read it, or that allocated it.
    """

    memory: torch.Tensor
    free: Any


class TableMemory:
    """Memory of table sets, kept across the steps of a runtime.

    Attributes:
        num_sets: sets in flight and free.
        num_in_flight: sets that a use holds.
    """

    def __init__(self) -> None:
        self.num_sets, self.num_in_flight = 0, 0
        self._set_bytes = 0
        self._streams: dict[torch.device, Streams] = {}
        self._free: dict[torch.device, list[TableSet]] = {}
        self._layers: dict[tuple[str, int], WeightCache] = {}

    def streams(self, device: torch.device) -> Streams:
        """Streams of a device, the same every time."""
        if device not in self._streams:
            self._streams[device] = streams_of(device)
        return self._streams[device]

    def share_streams(self, other: TableMemory) -> None:
        """Uses the side streams of another memory, such as of the device's other virtual ranks."""
        self._streams = other._streams

    def weights(self, model: str, index: int) -> WeightCache:
        """What the launches of a layer remember of its weights."""
        return self._layers.setdefault((model, index), WeightCache())

    def forget_model(self, model: str) -> None:
        """Drops what is remembered of the layers of a detached model."""
        for key in [key for key in self._layers if key[0] == model]:
            del self._layers[key]

    def forget_weights(self) -> None:
        """Lets hosts free the storage of their weights, between steps."""
        for cache in self._layers.values():
            cache.clear()

    def reserve(self, set_bytes: int) -> None:
        """Says how large the sets of the coming step are at most; smaller ones are not kept.

        Args:
            set_bytes: see `set_bytes`.
        """
        self._set_bytes = max(self._set_bytes, set_bytes)
        for device, sets in self._free.items():
            large = [one for one in sets if len(one.memory) >= self._set_bytes]
            self.num_sets -= len(sets) - len(large)
            self._drop(device, [one for one in sets if len(one.memory) < self._set_bytes])
            self._free[device] = large

    def take(self, num_bytes: int, device: torch.device) -> TableSet:
        """A set that nobody reads; the caller's stream waits for its ``free`` before it writes.

        Args:
            num_bytes: that are needed now; a set is as large as was reserved.
            device: of the tables.
        """
        if num_bytes > self._set_bytes:  # live routes, a second hop
            self.reserve(num_bytes)
        sets = self._free.setdefault(device, [])
        if not sets:
            streams, size = self.streams(device), self._set_bytes
            with streams.side(), torch.inference_mode(False):  # other modes write there later
                raw = torch.empty(size + ALIGN_BYTES, dtype=torch.uint8, device=device)
                shift = -raw.data_ptr() % ALIGN_BYTES
                sets.append(TableSet(raw[shift : shift + size], streams.record()))
            self.num_sets += 1
        self.num_in_flight += 1
        return sets.pop()

    def give_back(self, table_set: TableSet, free: Any) -> None:
        """A set is not read any more after an event."""
        table_set.free = free
        self.num_in_flight -= 1
        device = table_set.memory.device
        self._free.setdefault(device, []).append(table_set)
        self.reserve(0)  # it may be smaller than what is needed by now

    def clear(self) -> None:
        """Frees all sets that no use holds, and forgets all weights."""
        for device, sets in self._free.items():
            self._drop(device, sets)
            self.num_sets -= len(sets)
        self._free.clear()
        self._layers.clear()

    def _drop(self, device: torch.device, sets: Sequence[TableSet]) -> None:
        """Memory came from the side stream's allocations, which goes on after the last reader."""
        streams = self.streams(device)
        with streams.side():
            for one in sets:
                streams.wait(one.free)


def set_bytes(
    source: SourceRoute,
    splits: tuple[list[int], list[int]],
    sizes: tuple[int, int],
    block: int,
    *,
    exact: bool = True,
) -> int:
    """Bytes of the tables of one use of one layer, known before it starts.

    Derived: the int32 tables of `LayerTables` by shape, each on a 128-byte boundary, and the two
    numbers of `LaunchData`. Weight-gradient tiles come on top where a kernel wants them.

    Args:
        source: host integers of the use.
        splits: tokens to, and from, each rank.
        sizes: T and K.
        block: rows of a GEMM tile.
        exact: with the tables of rows that return one by one.
    """
    num_tokens, num_choices = sizes
    sent, received = sum(splits[0]), sum(splits[1])
    rows = count_padded_rows(source.slot_rows_n, block)
    entries = [
        *[num_tokens * num_choices] * (1 + exact),  # ids_TK, choice_to_return_TK
        *(sent, sent * num_choices),  # send_token_V, send_rows_VK
        num_tokens * min(num_choices, len(splits[0])),  # token_to_return_TJ
        received * num_choices,  # token_choice_to_row_UK
        sum(source.recv_rows_G) * exact,  # return_row_N
        *(rows, rows, rows // block * 4),  # row_to_token_R, row_to_choice_R, mtile_B4
        *(1, 1),
    ]
    return sum(_aligned(count * 4) for count in entries)


class ReleasedTables(LayerTables):
    """What is left of tables whose memory went back: any use of them is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{name}: these tables were given back after their backward (or after a forward "
            "without gradients); take a new handle from step.handle(...)"
        )


@dataclasses.dataclass
class _Built:
    """Tables, the memory they lie in, and the event after which they can be read."""

    tables: LayerTables
    table_set: TableSet
    ready: Any


class TableRing:
    """The tables of the uses of one step, by key.

    Args:
        memory: of the runtime.
        device: of the tables.
        model: name of the model.
    """

    def __init__(self, memory: TableMemory, device: torch.device, model: str) -> None:
        self.memory, self.device, self.model = memory, device, model
        self.streams = memory.streams(device)
        self._built: dict[Key, _Built] = {}

    def __contains__(self, key: Key) -> bool:
        """Whether the tables of a use of a layer were built and not released."""
        return key in self._built

    def __len__(self) -> int:
        """Sets in flight."""
        return len(self._built)

    def __getitem__(self, key: Key) -> LayerTables:
        """Tables of a use of a layer; the current stream goes on when they are there."""
        built = self._built[key]
        self.streams.wait(built.ready)
        return built.tables

    def build(self, key: Key, make: Callable[[], LayerTables], *, ahead: bool) -> None:
        """Builds the tables of a use of a layer.

        Args:
            key: pass, micro-batch, place of the layer.
            make: builds them in memory of their own; collective.
            ahead: on the side stream.
        """
        with self.streams.side() if ahead else contextlib.nullcontext():
            tables = make()
            launch = tables.launch
            if launch is None:
                weights = self.memory.weights(self.model, key[2])
                launch = LaunchData(tables.mtile_B4, tables.slot_rows_n, weights)
            table_set = self.memory.take(_total_bytes(tables, launch), self.device)
            self.streams.wait(table_set.free)
            placed = _place(tables, launch, table_set.memory)
            self._built[key] = _Built(placed, table_set, self.streams.record())

    def release(self, key: Key) -> None:
        """The current stream was the last to read these tables; nothing if there are none.

        Inside a backward that keeps its graph they stay, since it may come again.
        """
        if key not in self._built or keeps_graph():
            return
        built = self._built.pop(key)
        self.memory.give_back(built.table_set, self.streams.record())
        vars(built.tables).clear()
        object.__setattr__(built.tables, "__class__", ReleasedTables)

    def clear(self) -> None:
        """Releases everything, and the weights that launches remember; the step has ended."""
        for key in list(self._built):
            self.release(key)
        self.memory.forget_weights()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _device_tables(tables: Any) -> list[torch.Tensor]:
    """Tensors that kernels read, in the order of the fields, those of nested tables included."""
    found: list[torch.Tensor] = []
    for name, value in vars(tables).items():
        if isinstance(value, torch.Tensor):
            if name not in HOST_TABLES:
                found.append(value)
        elif dataclasses.is_dataclass(value):
            found += _device_tables(value)
    return found


def _with_tables(tables: Any, places: Iterator[torch.Tensor]) -> Any:
    """A copy with other tensors in the order of `_device_tables`, of the same shapes."""
    made = object.__new__(type(tables))
    fields = vars(made)
    for name, value in vars(tables).items():
        if isinstance(value, torch.Tensor):
            fields[name] = value if name in HOST_TABLES else next(places)
        elif dataclasses.is_dataclass(value):
            fields[name] = _with_tables(value, places)
        else:
            fields[name] = value
    return made


def _total_bytes(tables: LayerTables, launch: LaunchData) -> int:
    found = (*_device_tables(tables), *launch.tensors())
    return sum([_aligned(x.numel() * 4) for x in found])


def _place(tables: LayerTables, launch: LaunchData, memory: torch.Tensor) -> LayerTables:
    """The same tables in the memory of a set, with their launch data attached."""
    of_launch = launch.tensors()
    sources, places = [*_device_tables(tables), *of_launch], []
    with torch.inference_mode(False):  # a backward counts there
        words = memory.view(torch.int32)  # all tables are
        first = words.storage_offset()
        for source in sources:
            shape = source.shape
            places.append(words.as_strided(shape, (*shape[1:], 1), first))  # one or two dimensions
            first += _aligned(source.numel() * 4) // 4
    torch._foreach_copy_(places, sources)
    launch.move(places[len(places) - len(of_launch) :])
    placed: LayerTables = _with_tables(tables, iter(places))
    rows = tables.slot_rows_n.detach()  # of this use alone, so that nothing outlives it
    fields = vars(placed)
    fields["slot_rows_n"], fields["launch"] = rows, None
    attach(launch, placed.mtile_B4, rows)
    return placed
