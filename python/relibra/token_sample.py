"""A subsample of tokens, for what counts of rows cannot show: which experts are chosen together.

Letters: T sampled tokens, L MoE layers, K choices a token, E experts, G ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relibra.layout import Int32Array, frozen_ints
from relibra_kernels.errors import PlanError

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class TokenSample:
    """Expert ids of some tokens of the batch; 2,000 to 3,000 spread over it are enough.

    Args:
        ids_TLK: int32 `[T, L, K]`, any integers; -1 = no choice.
        source_rank_T: int32 `[T]`, rank that each token comes from, -1 = unknown; None = all
            unknown.

    Raises:
        TypeError: the ids are no integers.
        PlanError: wrong shapes, or values out of range.

    Example:
        >>> sample = TokenSample([[[0, 2]], [[1, 2]]], [0, 1])
        >>> sample.ids_TLK.shape, sample.source_rank_T.tolist()
        ((2, 1, 2), [0, 1])
    """

    ids_TLK: Int32Array
    source_rank_T: Int32Array = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        """Takes read-only arrays and checks them."""
        ids = frozen_ints(
            "token_sample.ids_TLK", self.ids_TLK, np.int32, shape=(None, None, None), minimum=-1
        )
        if len(ids) > MAX_TOKENS:
            raise PlanError(
                f"token_sample.ids_TLK: need at most {MAX_TOKENS} tokens, got {len(ids)}"
            )
        source: object = self.source_rank_T
        if source is None:
            source = np.full(len(ids), -1, np.int32)
        ranks = frozen_ints(
            "token_sample.source_rank_T", source, np.int32, shape=(len(ids),), minimum=-1
        )
        object.__setattr__(self, "ids_TLK", ids)
        object.__setattr__(self, "source_rank_T", ranks)

    def check(self, num_layers: int, num_experts: int, num_ranks: int) -> None:
        """Checks that the sample belongs to a model on some ranks.

        Raises:
            PlanError: it does not.
        """
        layers = self.ids_TLK.shape[1]
        if layers != num_layers:
            raise PlanError(f"token_sample: need {num_layers} MoE layers, got {layers}")
        for name, values, limit in (
            ("ids_TLK", self.ids_TLK, num_experts),
            ("source_rank_T", self.source_rank_T, num_ranks),
        ):
            highest = int(values.max(initial=-1))
            if highest >= limit:
                raise PlanError(f"token_sample.{name}: need -1..{limit - 1}, got {highest}")

    def only_layers(self, first: int, last: int) -> TokenSample:
        """The same tokens in some neighbouring layers."""
        return TokenSample(self.ids_TLK[:, first:last], self.source_rank_T)


def as_token_sample(value: TokenSample | npt.ArrayLike) -> TokenSample:
    """A sample from what a caller gave: one, or ids alone.

    Raises:
        TypeError, PlanError: as `TokenSample`.
    """
    return value if isinstance(value, TokenSample) else TokenSample(value)  # type: ignore[arg-type]
