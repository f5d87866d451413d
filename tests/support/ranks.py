"""Starts the processes of a process group, each with its own rank and task."""

import datetime
import os
import pickle

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from sqrtdk import SqrtdkError  # noqa: E402


def reduce_on_rank(rank, world, folder, task):
    """Join the group as one rank, summarise its rows, and write the result or the text of the error."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        result = task(rank, world)
    except SqrtdkError as error:
        result = str(error)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()  # gloo aborts a rank that is still connected when another rank ends
    dist.destroy_process_group()
    os._exit(0)  # threads of a mesh's groups may outlive the groups and abort a regular exit


def run_ranks(folder, world, task):
    """Return the results of all ranks, each from its own process."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=reduce_on_rank, args=(rank, world, folder, task)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * world
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]
