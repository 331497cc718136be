"""How a GPU does the work of replica synchronisation."""

from __future__ import annotations

import dataclasses
import os

from relibra_kernels.checks import check_choice, check_int

PUSH_FORMS = ("copy_engine", "sm", "tma")
WAIT_FORMS = ("auto", "stream", "kernel")
MAX_BLOCKS = 1024


@dataclasses.dataclass(frozen=True)
class CudaOptions:
    """How a GPU does the work.

    Attributes:
        push: weights by ``"copy_engine"`` (no SM), ``"sm"``, or ``"tma"`` (few SMs; sm_90).
        waits: of the streams for copies and sums: ``"stream"`` (no SM) or ``"kernel"``; ``"auto"``
            is ``"kernel"`` where all streams share a hardware queue, which a waiting stream would
            block.
        push_blocks: blocks of a push by SMs.
        reduce_blocks: blocks of a sum.

    Raises:
        TypeError, ValueError: another form, or no number of blocks.

    Example:
        >>> CudaOptions(push="sm").waits
        'auto'
    """

    push: str = "copy_engine"
    waits: str = "auto"
    push_blocks: int = 16
    reduce_blocks: int = 32

    def __post_init__(self) -> None:
        """Check the forms and numbers."""
        check_choice("push", self.push, PUSH_FORMS)
        check_choice("waits", self.waits, WAIT_FORMS)
        check_int("push_blocks", self.push_blocks, minimum=1, maximum=MAX_BLOCKS)
        check_int("reduce_blocks", self.reduce_blocks, minimum=1, maximum=MAX_BLOCKS)

    def waits_form(self) -> str:
        """``"stream"`` or ``"kernel"``, by the environment where both will do."""
        if self.waits != "auto":
            return self.waits
        shared = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1"
        return "kernel" if shared else "stream"
