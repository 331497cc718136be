"""Places of rows among others, by torch ops whose sizes are known on the host: no device sync.

Letters: T tokens, K choices, V sent tokens.
"""

from __future__ import annotations

import torch


def compact(table: torch.Tensor, count: int) -> torch.Tensor:
    """Entries of ``table`` that are not -1, in order; ``count`` of them, known on the host.

    Example:
        >>> compact(torch.tensor([[4, -1], [-1, 2]], dtype=torch.int32), 2).tolist()
        [4, 2]
    """
    flat = table.reshape(-1)
    place = torch.where(flat >= 0, torch.cumsum(flat >= 0, 0) - 1, count)
    out = torch.empty(count + 1, dtype=table.dtype, device=table.device)
    return out.scatter_(0, place, flat)[:count].contiguous()


def by_choice(place_VK: torch.Tensor, send_token_V: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Values of the choices of sent tokens, by token.

    Args:
        place_VK: int32 ``[V, K]``, -1 where the choice does not travel with this row.
        send_token_V: int32 ``[V]``, token of each row.
        num_tokens: T.

    Returns:
        int32 ``[T, K]``, -1 for a choice that does not travel.

    Example:
        >>> by_choice(torch.tensor([[7, -1], [-1, 8]], dtype=torch.int32),
        ...           torch.tensor([1, 1], dtype=torch.int32), 2).tolist()
        [[-1, -1], [7, 8]]
    """
    num_choices = place_VK.shape[1]
    choice = send_token_V.long()[:, None] * num_choices + torch.arange(
        num_choices, device=send_token_V.device
    )
    size = num_tokens * num_choices
    out = torch.full((size + 1,), -1, dtype=torch.int32, device=send_token_V.device)
    flat = place_VK.reshape(-1)
    out.scatter_(0, torch.where(flat >= 0, choice.reshape(-1), size), flat)
    return out[:size].reshape(num_tokens, num_choices).contiguous()


def numbered(mask: torch.Tensor) -> torch.Tensor:
    """Running number of each true entry in row-major order, int32, -1 where false.

    Example:
        >>> numbered(torch.tensor([[True, False], [True, True]])).tolist()
        [[0, -1], [1, 2]]
    """
    number = (torch.cumsum(mask.reshape(-1), 0) - 1).to(torch.int32).view(mask.shape)
    return torch.where(mask, number, -1)


def by_rank(pair_TK: torch.Tensor, rank_TK: torch.Tensor, width: int) -> torch.Tensor:
    """Distinct pairs of a token by ascending rank.

    Args:
        pair_TK: int32 ``[T, K]``, pair of each choice; equal where the ranks are equal.
        rank_TK: int32 ``[T, K]``, rank of each choice, -1 for none.
        width: J, at least the number of distinct ranks of a token.

    Returns:
        int32 ``[T, J]``, -1 behind the last.

    Example:
        >>> by_rank(torch.tensor([[5, 4, 5], [6, -1, 7]], dtype=torch.int32),
        ...         torch.tensor([[3, 1, 3], [0, -1, 2]], dtype=torch.int32), 2).tolist()
        [[4, 5], [6, 7]]
    """
    last = torch.iinfo(rank_TK.dtype).max
    ranks, order = torch.sort(torch.where(rank_TK >= 0, rank_TK, last), dim=1, stable=True)
    first = ranks != last
    first[:, 1:] &= ranks[:, 1:] != ranks[:, :-1]
    place = torch.where(first, torch.cumsum(first, 1) - 1, width)
    out = pair_TK.new_full((len(pair_TK), width + 1), -1)
    return out.scatter_(1, place, pair_TK.gather(1, order))[:, :width].contiguous()
