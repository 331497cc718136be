"""Ranks of which one dies or stays away, while the others may take all the time they need."""

import datetime
import os
import time
from multiprocessing import get_context

import torch
import torch.distributed as dist

LIMIT_S = 60


def survivors_tell(num_ranks, lost, fn, folder):
    """``fn(rank)`` on forked ranks of a gloo group; what it returned on all but the lost one.

    The lost rank runs ``fn`` too. If it lives, it leaves only after the others have answered, as
    do they: nobody is taken for dead because it was quick.
    """
    folder.mkdir(exist_ok=True)
    survivors = [rank for rank in range(num_ranks) if rank != lost]
    processes = [
        get_context("fork").Process(
            target=_main, args=(rank, num_ranks, fn, folder, survivors), daemon=True
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hung, f"ranks {hung} hang"
    return {rank: (folder / f"told_{rank}").read_text() for rank in survivors}


def _main(rank, num_ranks, fn, folder, survivors):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=LIMIT_S),
        )
        # No rank dies while another still connects; a barrier would not tell when all have left it.
        (folder / f"ready_{rank}").touch()
        wait_for_files(folder, "ready", range(num_ranks))
        told = fn(rank)
    except BaseException as error:
        told = f"unexpected {error!r}"
    if rank in survivors:
        (folder / f"part_{rank}").write_text(str(told))
        (folder / f"part_{rank}").rename(folder / f"told_{rank}")
    wait_for_files(folder, "told", survivors)
    os._exit(0)


def wait_for_files(folder, name, ranks):
    """Until all of these ranks have written theirs."""
    while not all((folder / f"{name}_{rank}").exists() for rank in ranks):
        time.sleep(0.005)
