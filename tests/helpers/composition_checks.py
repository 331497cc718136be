"""The rules of a composition, from its definition."""

import numpy as np


def _groups(cells):
    return np.zeros(cells, int) if isinstance(cells, int) else np.asarray(cells)


def squares(samples, cells, composition):
    """Sum over (group of cells, micro-batch, layer, expert) of the squared rows."""
    total = 0.0
    group_J = _groups(cells)[composition.cell_J]
    for m in range(composition.num_micro_batches):
        for group in np.unique(_groups(cells)):
            chosen = (composition.micro_batch_J == m) & (group_J == group)
            total += float((samples.rows_JLE[chosen].sum(0, dtype=np.int64) ** 2).sum())
    return total


def broken_rules(samples, cells, budgets, composition, keep):
    """Names of the rules that a composition breaks."""
    broken = []
    steps = sorted(set(samples.optimizer_step_J.tolist()))
    counts = budgets.micro_batches
    counts = [counts] * len(steps) if isinstance(counts, int) else list(counts)
    if composition.optimizer_step_M.tolist() != np.repeat(steps, counts).tolist():
        broken.append("micro-batches")
    for step in steps:  # the multiset of samples of each step
        entries = [entry for entry in composition if entry.optimizer_step == step]
        found = sorted(sample for entry in entries for sample in entry.samples)
        if found != np.flatnonzero(samples.optimizer_step_J == step).tolist():
            broken.append("steps")
            break
    for entry in composition:
        chosen = list(entry.samples)
        for name, value in (
            ("tokens", samples.tokens_J[chosen].sum()),
            ("attention_cost", samples.attention_cost_J[chosen].sum()),
            ("count", len(chosen)),
        ):
            limit = getattr(budgets, name)
            if limit is not None and value > limit:
                broken.append(name)
        if len(chosen) < budgets.least_count:
            broken.append("least_count")
    if keep == "group":
        column = composition.micro_batch_J * 1000 + _groups(cells)[composition.cell_J]
        of_group = {}
        for j, key in enumerate(zip(samples.group_J, samples.optimizer_step_J, strict=True)):
            of_group.setdefault(key, set()).add(int(column[j]))
        if any(len(columns) > 1 for columns in of_group.values()):
            broken.append("groups")
    return broken
