"""Which slot is the home of each expert, for one layer.

Letters: G ranks, H home slots a rank, E experts.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from relibra_kernels.checks import check_int_array
from relibra_kernels.errors import PlanError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """Home slots of one layer's experts.

    Args:
        home_slot_expert_GH: int32 `[G, H]`, expert whose home is slot j of rank g, -1 = filler slot
            (only when E is no multiple of G). Every expert appears exactly once.

    Raises:
        PlanError: an expert is missing, twice there, or out of range.

    Example:
        >>> layout = ExpertLayout([[2, 0], [1, 3]])
        >>> layout.expert_to_slot.tolist(), layout.home_rank_E.tolist()
        ([1, 2, 0, 3], [0, 1, 0, 1])
        >>> layout.moved_experts(ExpertLayout.identity(4, 2)).tolist()
        [1, 2]
    """

    home_slot_expert_GH: Int32Array

    def __post_init__(self) -> None:
        """Takes a read-only copy and checks that it is a permutation of the experts."""
        name = "home_slot_expert_GH"
        slots = frozen_ints(
            name, self.home_slot_expert_GH, np.int32, shape=(None, None), minimum=-1
        )
        experts = np.sort(slots[slots >= 0])
        if experts.size == 0:
            raise PlanError(f"{name}: need at least one expert, got shape {list(slots.shape)}")
        if not np.array_equal(experts, np.arange(experts.size)):
            wrong = np.flatnonzero(experts != np.arange(experts.size))[0]
            raise PlanError(
                f"{name}: need every expert 0..{experts.size - 1} exactly once, got expert "
                f"{experts[wrong]} where {wrong} is due"
            )
        object.__setattr__(self, "home_slot_expert_GH", slots)

    @classmethod
    def identity(cls, num_experts: int, num_ranks: int) -> "ExpertLayout":
        """Experts in order over the ranks; filler slots come last on the last ranks.

        Args:
            num_experts: E.
            num_ranks: G; with E no multiple of G the first ranks hold one expert more, so that no
                rank has more than one filler slot.

        Example:
            >>> ExpertLayout.identity(5, 2).home_slot_expert_GH.tolist()
            [[0, 1, 2], [3, 4, -1]]
        """
        for name, value in (("num_experts", num_experts), ("num_ranks", num_ranks)):
            if value < 1:
                raise PlanError(f"{name}: need an integer >= 1, got {value}")
        held = num_experts // num_ranks + (np.arange(num_ranks) < num_experts % num_ranks)
        slot = np.arange(-(-num_experts // num_ranks))
        experts = np.cumsum(held)[:, None] - held[:, None] + slot
        return cls(np.where(slot < held[:, None], experts, -1).astype(np.int32))

    @property
    def num_ranks(self) -> int:
        """G."""
        return int(self.home_slot_expert_GH.shape[0])

    @property
    def slots_per_rank(self) -> int:
        """H."""
        return int(self.home_slot_expert_GH.shape[1])

    @cached_property
    def num_experts(self) -> int:
        """E."""
        return int((self.home_slot_expert_GH >= 0).sum())

    @property
    def slot_to_expert(self) -> Int32Array:
        """int32 `[G*H]`, -1 = filler."""
        return self.home_slot_expert_GH.reshape(-1)

    @cached_property
    def expert_to_slot(self) -> Int32Array:
        """int32 `[E]`, home slot rank*H + j of each expert."""
        used = np.flatnonzero(self.slot_to_expert >= 0)
        slots = np.empty(self.num_experts, np.int32)
        slots[self.slot_to_expert[used]] = used
        slots.flags.writeable = False
        return slots

    @cached_property
    def home_rank_E(self) -> Int32Array:
        """int32 `[E]`, home rank of each expert."""
        ranks = (self.expert_to_slot // self.slots_per_rank).astype(np.int32)
        ranks.flags.writeable = False
        return ranks

    def moved_experts(self, other: "ExpertLayout") -> Int64Array:
        """Experts whose home rank differs between the two layouts, ascending."""
        if other.num_experts != self.num_experts:
            raise PlanError(f"other: need {self.num_experts} experts, got {other.num_experts}")
        return np.flatnonzero(self.home_rank_E != other.home_rank_E)

    def __eq__(self, other: object) -> bool:
        """Equality of the slot tables."""
        if not isinstance(other, ExpertLayout):
            return NotImplemented
        return np.array_equal(self.home_slot_expert_GH, other.home_slot_expert_GH)

    def __hash__(self) -> int:
        """Hash of the slot table."""
        return hash((self.home_slot_expert_GH.shape, self.home_slot_expert_GH.tobytes()))


def frozen_ints(
    name: str,
    value: object,
    dtype: npt.DTypeLike,
    *,
    shape: tuple[int | None, ...],
    minimum: int,
    maximum: int | None = None,
) -> npt.NDArray[np.signedinteger]:
    """A read-only integer array, copied unless it already is one.

    Args:
        name: argument name for messages.
        value: array, CPU tensor or nested list of integers.
        dtype: of the result.
        shape: sizes, None where any size is right.
        minimum: smallest value accepted.
        maximum: largest value accepted; None is the largest of `dtype`.

    Raises:
        TypeError: the values are no integers.
        PlanError: wrong shape, or a value out of range.

    Example:
        >>> frozen_ints("ids", [0, -1], np.int32, shape=(2,), minimum=-1).flags.writeable
        False
    """
    try:
        array = check_int_array(
            name, value, shape=shape, minimum=minimum, maximum=maximum, dtype=dtype
        )
    except TypeError:
        raise
    except ValueError as error:
        raise PlanError(str(error)) from None
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def frozen_static(value: object, size: tuple[int, ...], letters: str) -> Int32Array:
    """A read-only table of static slots; None is a table without slots.

    Args:
        value: int32 `[*size, X]`, expert of each static slot, -1 free; or None.
        size: sizes before X of the table that None stands for.
        letters: of the axes, for messages.

    Raises:
        TypeError, PlanError: as `frozen_ints`.

    Example:
        >>> frozen_static(None, (3, 2), "LGX").shape
        (3, 2, 0)
    """
    if value is None:
        value = np.zeros((*size, 0), np.int32)
    name = f"static_slot_expert_{letters}"
    shape = (None,) * (len(size) + 1)
    static: Int32Array = frozen_ints(name, value, np.int32, shape=shape, minimum=-1)
    return static
