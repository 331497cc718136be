"""Weighted and plain sums of rows beside torch's, in GB/s and percent of a copy.

    python perf/bench_combine.py [--smoke] [--json FILE]

F3 multiplies by scores, F4, B4 and B5 do not. Bytes are those that must move: every row that is
summed once, every sum once, the tables.
"""

import torch
from bandwidth import run_cases, tables


def make(sizes, device, dtype):
    num_tokens, width, num_choices = sizes
    places, row_to_token, scores = tables(num_tokens, num_choices, device)
    rows = torch.randn(len(row_to_token), width, device=device).to(dtype)
    combine, item = torch.ops.relibra.combine, rows.element_size()
    plain = (num_choices + 1) * num_tokens * width * item + places.numel() * 4
    scored = plain + scores.numel() * 4

    def torch_sum(weights):
        taken = rows[places.long()].float()
        return (taken if weights is None else taken * weights[..., None]).sum(1).to(dtype)

    return {
        "with scores (F3)": {
            "torch index, sum": (lambda: torch_sum(scores), scored),
            "relibra": (lambda: combine(rows, places, scores), scored),
        },
        "sum (F4, B4, B5)": {
            "torch index, sum": (lambda: torch_sum(None), plain),
            "relibra": (lambda: combine(rows, places, None), plain),
        },
    }


if __name__ == "__main__":
    run_cases("combine", make)
