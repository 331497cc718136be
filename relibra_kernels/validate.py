"""Debug checks of index tables: bounds, inverses, every choice served exactly once.

Meant for tests and for hunting a wrong plan; each check reads whole tables on the CPU. Letters as
in `relibra_kernels.tables`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from relibra_kernels.tables import m_tiles, slot_bases

if TYPE_CHECKING:
    from collections.abc import Sequence


class RankTables(Protocol):
    """The tables of one use of one layer on one rank; see the ops that build them."""

    @property
    def ids_TK(self) -> torch.Tensor:
        """Integer ``[T, K]``, expert ids."""
        ...

    @property
    def send_token_V(self) -> torch.Tensor:
        """int32 ``[V]``, see ``build_route``."""
        ...

    @property
    def send_rows_VK(self) -> torch.Tensor:
        """int32 ``[V, K]``, see ``build_route``."""
        ...

    @property
    def token_to_return_TJ(self) -> torch.Tensor:
        """int32 ``[T, J]``, see ``build_route``."""
        ...

    @property
    def send_splits(self) -> list[int]:
        """Tokens to each rank."""
        ...

    @property
    def recv_splits(self) -> list[int]:
        """Tokens from each rank."""
        ...

    @property
    def token_choice_to_row_UK(self) -> torch.Tensor:
        """int32 ``[U, K]``, the rows received."""
        ...

    @property
    def row_to_token_R(self) -> torch.Tensor:
        """int32 ``[R]``, see ``build_rows``."""
        ...

    @property
    def row_to_choice_R(self) -> torch.Tensor:
        """int32 ``[R]``, see ``build_rows``."""
        ...

    @property
    def slot_rows_n(self) -> torch.Tensor:
        """int32 ``[n]``, rows of each slot."""
        ...

    @property
    def mtile_B4(self) -> torch.Tensor:
        """int32 ``[B, 4]``, see `relibra_kernels.tables.m_tiles`."""
        ...


def validate_source(tables: RankTables) -> None:
    """Checks what a source sends: each choice to one rank, each token once to a rank.

    Args:
        tables: one rank's tables.

    Raises:
        ValueError: names the table, the need and the first place that breaks it.
    """
    ids, token, rows = (
        table.numpy() for table in (tables.ids_TK, tables.send_token_V, tables.send_rows_VK)
    )
    num_tokens, num_choices = ids.shape
    _need("send_splits", sum(tables.send_splits) == token.size, f"a sum of {token.size}")
    _need("send_token_V", ((token >= 0) & (token < num_tokens)).all(), f"0 <= token < {num_tokens}")
    rank = np.repeat(np.arange(len(tables.send_splits)), tables.send_splits)
    _need(
        "send_token_V",
        (np.diff(rank * np.int64(max(num_tokens, 1)) + token) > 0).all(),
        "ascending tokens for each rank",
    )
    sent, choice = np.nonzero(rows >= 0)
    served = np.bincount(token[sent] * num_choices + choice, minlength=ids.size).reshape(ids.shape)
    wrong = np.argwhere(served != (ids >= 0))
    if len(wrong):
        t, k = wrong[0].tolist()
        raise ValueError(
            f"send_rows_VK: need every (token, choice) that is not -1 exactly once, got token {t}, "
            f"choice {k} (id {ids[t, k]}) {served[t, k]} times"
        )
    _need("send_rows_VK", (rows >= 0).any(1).all(), "a row for every sent token")
    expected = np.full(tables.token_to_return_TJ.shape, -1)
    by_token = np.argsort(token, kind="stable")
    count_T = np.bincount(token, minlength=num_tokens)
    place = np.arange(token.size) - np.repeat(np.cumsum(count_T) - count_T, count_T)
    expected[token[by_token], place] = by_token
    _need(
        "token_to_return_TJ",
        np.array_equal(tables.token_to_return_TJ.numpy(), expected),
        "every sent row of a token once, by ascending rank, then -1",
    )


def validate_destination(tables: RankTables, num_home: int, block_rows: int) -> None:
    """Checks what a rank computes: row tables that are inverses, slots filled, tiles that cover.

    Args:
        tables: one rank's tables.
        num_home: H.
        block_rows: rows of a tile.

    Raises:
        ValueError: names the table, the need and the first place that breaks it.
    """
    choice_to_row, row_to_token, row_to_choice = (
        table.numpy()
        for table in (tables.token_choice_to_row_UK, tables.row_to_token_R, tables.row_to_choice_R)
    )
    num_received, num_choices = choice_to_row.shape
    _need("recv_splits", sum(tables.recv_splits) == num_received, f"a sum of {num_received}")
    slot_rows, base = tables.slot_rows_n.numpy(), slot_bases(tables.slot_rows_n, block_rows).numpy()
    for name, table in (("row_to_token_R", row_to_token), ("row_to_choice_R", row_to_choice)):
        _need(name, table.size == base[-1], f"{base[-1]} rows, the last slot base")
    real = np.flatnonzero(row_to_choice >= 0)
    begin = np.repeat(base[:-1], slot_rows)
    inside = np.arange(begin.size) - np.repeat(np.cumsum(slot_rows) - slot_rows, slot_rows)
    _need("row_to_choice_R", np.array_equal(real, begin + inside), "the first rows of each slot")
    flat = choice_to_row.reshape(-1)
    _need("row_to_choice_R", (row_to_choice[real] < flat.size).all(), f"choices below {flat.size}")
    _need(
        "token_choice_to_row_UK",
        np.array_equal(np.sort(flat[flat >= 0]), real),
        "every row that is no padding exactly once",
    )
    _need("row_to_choice_R", (flat[row_to_choice[real]] == real).all(), "the inverse of the rows")
    token = np.where(row_to_choice >= 0, row_to_choice // max(num_choices, 1), -1)
    _need("row_to_token_R", np.array_equal(row_to_token, token), "row_to_choice_R // K")
    tiles = m_tiles(tables.slot_rows_n, num_home, block_rows).numpy()
    _need("mtile_B4", np.array_equal(tables.mtile_B4.numpy(), tiles), "the tiles of slot_rows_n")


def validate_group(tables_G: Sequence[RankTables], num_home: int, block_rows: int) -> None:
    """Checks a whole EP group: what one rank sends is what another computes, nothing twice.

    Args:
        tables_G: the tables of every rank, in rank order.
        num_home: H.
        block_rows: rows of a tile.

    Raises:
        ValueError: names the rank, the table, the need and the first place that breaks it.
    """
    for rank, tables in enumerate(tables_G):
        try:
            validate_source(tables)
            validate_destination(tables, num_home, block_rows)
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from error
    for rank, tables in enumerate(tables_G):
        sent = [source.send_splits[rank] for source in tables_G]
        _need(f"rank {rank}: recv_splits", list(tables.recv_splits) == sent, str(sent))
        rows = [
            torch.split(source.send_rows_VK, list(source.send_splits))[rank].numpy()
            for source in tables_G
        ]
        _need(
            f"rank {rank}: token_choice_to_row_UK",
            np.array_equal(tables.token_choice_to_row_UK.numpy(), np.concatenate(rows)),
            "the send_rows of all sources in rank order",
        )


def _need(name: str, holds: bool | np.bool_, need: str) -> None:
    if not holds:
        raise ValueError(f"{name}: need {need}, got something else")
