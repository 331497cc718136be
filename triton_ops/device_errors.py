"""The error word: what kernels found wrong in tables whose values the host never reads.

A kernel that meets a wrong value leaves it out, so that no access leaves a buffer, and sets a bit.
"""

import triton
import triton.language as tl

BAD_ID = tl.constexpr(1)
OVER_QUOTA = tl.constexpr(2)
BAD_SLOT = tl.constexpr(4)
WRONG_NUM_SENT = tl.constexpr(8)
BAD_ROW = tl.constexpr(16)
ROW_TWICE = tl.constexpr(32)
OTHER_IDS = 64  # set by the layer, not by a kernel

MEANINGS = {
    BAD_ID.value: "ids_TK: an expert id outside [-1, E)",
    OVER_QUOTA.value: "slot_quota: more choices of an expert than its slots have quota",
    BAD_SLOT.value: "slot_id: a slot of no rank",
    WRONG_NUM_SENT.value: "num_sent: not the number of distinct (token, rank) pairs",
    BAD_ROW.value: "token_choice_to_row_UK: a row outside [-1, R)",
    ROW_TWICE.value: "token_choice_to_row_UK: a row that two choices claim",
    OTHER_IDS: "expert_ids: other ids than the replayed ones",
}


@triton.jit
def report(error_ptr, wrong, BIT: tl.constexpr):
    """Sets a bit of the error word if any lane is wrong."""
    if tl.max(wrong.to(tl.int32)) != 0:
        tl.atomic_or(error_ptr, BIT)
