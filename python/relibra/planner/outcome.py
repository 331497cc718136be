"""What a strategy returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from relibra.layout import ExpertLayout
    from relibra.plan import PassPlan


@dataclass(frozen=True)
class Outcome:
    """Layouts and passes of a strategy.

    Args:
        layouts: one a layer.
        passes: `PassPlan` of every distinct pass.
        is_executable: False when the passes hold rows of ranks only.
    """

    layouts: tuple[ExpertLayout, ...]
    passes: Mapping[str, PassPlan]
    is_executable: bool = True
