"""The task: sort four digits out of eight. The reward is the fraction of positions that are right.

An all-or-nothing reward stays at zero with random weights, so each position counts.

Letters: B samples, n digits of a prompt.
"""

from __future__ import annotations

import dataclasses

import torch

_SEED_OF_SPLIT = 20_240_601


@dataclasses.dataclass(frozen=True)
class SortTask:
    """Prompts ``BOS d1 .. dn SEP``, completions ``d1 .. dn`` in ascending order.

    Attributes:
        num_symbols: Digits 0 .. num_symbols-1; the two tokens after them are BOS and SEP.
        num_digits: n, digits of a prompt.
        num_held_out: Prompts that training never draws.

    Example:
        >>> task = SortTask()
        >>> task.prompt_tokens(torch.tensor([[3, 0, 7, 3]])).tolist()
        [[8, 3, 0, 7, 3, 9]]
        >>> task.fraction_right(torch.tensor([[3, 0, 7, 3]]), torch.tensor([[0, 3, 7, 3]])).tolist()
        [0.5]
    """

    num_symbols: int = 8
    num_digits: int = 4
    num_held_out: int = 256

    def __post_init__(self) -> None:
        """Check that prompts remain for training."""
        if not 0 < self.num_held_out < self.num_symbols**self.num_digits:
            raise ValueError(
                f"num_held_out: need 1 to {self.num_symbols**self.num_digits - 1}, "
                f"got {self.num_held_out}"
            )

    @property
    def vocab_size(self) -> int:
        """Digits, BOS and SEP."""
        return self.num_symbols + 2

    @property
    def prompt_length(self) -> int:
        """Tokens before the first token of the completion."""
        return self.num_digits + 2

    @property
    def sample_length(self) -> int:
        """Tokens of one sample: prompt and completion."""
        return self.prompt_length + self.num_digits

    def _digits(self, codes: torch.Tensor) -> torch.Tensor:
        places = self.num_symbols ** torch.arange(self.num_digits)
        return codes[:, None] // places % self.num_symbols

    def _split(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED_OF_SPLIT)
        return torch.randperm(self.num_symbols**self.num_digits, generator=generator)

    def held_out(self) -> torch.Tensor:
        """Digits of the held-out prompts, int64 ``[num_held_out, n]``; the same in every run."""
        return self._digits(self._split()[: self.num_held_out])

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Draw digits of ``count`` training prompts, int64 ``[count, n]``, never a held-out one."""
        pool = self._split()[self.num_held_out :]
        return self._digits(pool[torch.randint(0, len(pool), (count,), generator=generator)])

    def prompt_tokens(self, digits: torch.Tensor) -> torch.Tensor:
        """Tokens of the prompts, int64 ``[B, n+2]``, of digits ``[B, n]``."""
        edge = digits.new_full((len(digits), 1), self.num_symbols)
        return torch.cat([edge, digits, edge + 1], dim=1)

    def fraction_right(self, digits: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """Reward of each completion, float32 ``[B]`` in [0, 1].

        Args:
            digits: int64 ``[B, n]``, digits of the prompts.
            completions: int64 ``[B, n]``, tokens that the policy gave.
        """
        return (completions == digits.sort(dim=1).values).float().mean(dim=1)
