"""The destination's row tables, scattered from the rows that travelled with the tokens."""

from __future__ import annotations

import numpy as np
import torch


def build_rows(
    token_choice_to_row_UK: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverts ``token_choice_to_row``: which received token and choice each row computes.

    Args:
        token_choice_to_row_UK: int32 ``[U, K]``, row of each choice of a received token; -1 where
            the choice is computed elsewhere.
        num_rows: R, rows computed here including padding.

    Returns:
        ``row_to_token`` int32 ``[R]`` and ``row_to_choice`` int32 ``[R]`` (= ``u * K + k``); -1 on
        padding rows.

    Raises:
        ValueError: a row outside [-1, R), or a row that two choices claim.

    Example:
        >>> import relibra_kernels
        >>> rows = torch.tensor([[4, 0], [-1, 1]], dtype=torch.int32)
        >>> [table.tolist() for table in torch.ops.relibra.build_rows(rows, 6)]
        [[0, 1, -1, -1, 0, -1], [1, 3, -1, -1, 0, -1]]
    """
    num_choices = token_choice_to_row_UK.shape[1]
    flat = token_choice_to_row_UK.numpy().reshape(-1)
    wrong = np.flatnonzero((flat < -1) | (flat >= num_rows))
    if wrong.size:
        token, choice = divmod(int(wrong[0]), num_choices)
        raise ValueError(
            f"token_choice_to_row_UK: need -1 <= row < {num_rows}, got {int(flat[wrong[0]])} "
            f"at token {token}, choice {choice}"
        )
    served = np.flatnonzero(flat >= 0)
    row_to_choice = np.full(num_rows, -1, np.int32)
    row_to_choice[flat[served]] = served
    lost = served[row_to_choice[flat[served]] != served]
    if lost.size:
        raise ValueError(
            f"token_choice_to_row_UK: need every row at most once, got row {int(flat[lost[0]])} "
            f"for choices {int(lost[0])} and {int(row_to_choice[flat[lost[0]]])} (u * K + k)"
        )
    row_to_token = np.where(row_to_choice >= 0, row_to_choice // max(num_choices, 1), -1)
    return torch.from_numpy(row_to_token.astype(np.int32)), torch.from_numpy(row_to_choice)
