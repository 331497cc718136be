"""Tokens to rows and back beside torch's indexing, in GB/s and percent of a copy.

    python perf/bench_permute.py [--smoke] [--json FILE]

Bytes are those that must move: every token once, every row once, the tables.
"""

import torch
from bandwidth import run_cases, tables


def make(sizes, device, dtype):
    num_tokens, width, num_choices = sizes
    places, row_to_token, _ = tables(num_tokens, num_choices, device)
    num_rows = len(row_to_token)
    x = torch.randn(num_tokens, width, device=device).to(dtype)
    rows = torch.randn(num_rows, width, device=device).to(dtype)
    ops, item = torch.ops.relibra, x.element_size()
    permuted = (num_tokens + num_rows) * width * item + num_rows * 4
    taken = 2 * num_tokens * num_choices * width * item + places.numel() * 4

    def index_tokens():
        out = x[row_to_token.clamp(min=0).long()]
        return out.masked_fill_((row_to_token < 0)[:, None], 0)

    return {
        "token_permute": {
            "torch index": (index_tokens, permuted),
            "relibra": (lambda: ops.token_permute(x, row_to_token, places), permuted),
        },
        "token_unpermute": {
            "torch index": (lambda: rows[places.long()], taken),
            "relibra": (lambda: ops.token_unpermute(rows, places), taken),
        },
    }


if __name__ == "__main__":
    run_cases("permute", make)
