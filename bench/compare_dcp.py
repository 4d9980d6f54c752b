#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""compare_dcp.py - the saves and loads of bench_checkpoint.c in PyTorch's distributed checkpoint (DCP)
over Gloo, and dd, all in one run

    venv/bin/python bench/compare_dcp.py [--bench build/bench/bench_checkpoint] [--ranks 2]
        [--mib 256] [--rounds 3] [--dir /tmp]

Both programs have 16 tensors of --mib MiB in the whole, sharded over the ranks, and 300 tensors of
8 x 8. PyTorch runs in its own form (torch_save) and in that of Hugging Face (safetensors), each save
with fsync as DCP has it by default, each load of files that the system has in memory. Times are those
of the slowest rank, medians over rounds behind a first one. It needs torch and safetensors.
"""
import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings

warnings.filterwarnings("ignore")


def tensors(count, rows, columns, zero):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    import torch.distributed as dist
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.arange(rows // dist.get_world_size() * columns, dtype=torch.float32)
    local = local.reshape(-1, columns)
    return {f"w{i}": DTensor.from_local(torch.zeros_like(local) if zero else local.clone(), mesh,
                                        [Shard(0)]) for i in range(count)}


def slowest(function):
    import torch
    import torch.distributed as dist
    dist.barrier()
    start = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        function()
    took = torch.tensor(1000 * (time.monotonic() - start), dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def rank_main(rank, ranks, mib, rounds, folder, out):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import (HuggingFaceStorageReader,
                                                         HuggingFaceStorageWriter)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=ranks)
    forms = {"torch_save": (dcp.FileSystemWriter, dcp.FileSystemReader),
             "safetensors": (lambda p: HuggingFaceStorageWriter(p, save_distributed=True),
                             HuggingFaceStorageReader)}
    times = {}
    for i in range(rounds + 1):
        for form, (writer, reader) in forms.items():
            for name, shape in (("large", (16, mib * 1048576 // 65536, 1024)),
                                ("tiny", (300, 8, 8))):
                path, state = f"{folder}/{form}.{name}.{i}", tensors(*shape, False)
                save = slowest(lambda: dcp.save(state, storage_writer=writer(path)))
                into = tensors(*shape, True)
                load = slowest(lambda: dcp.load(into, storage_reader=reader(path)))
                if i:
                    times.setdefault(f"{form} {name} save", []).append(save)
                    times.setdefault(f"{form} {name} load", []).append(load)
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(path)
    if rank == 0:
        with open(out, "w", encoding="utf-8") as f:
            json.dump(times, f)
    dist.destroy_process_group()


def dd(folder, mib, rounds):
    times = []
    for _ in range(rounds):
        start = time.monotonic()
        subprocess.run(["dd", "if=/dev/zero", f"of={folder}/dd", "bs=4M", f"count={mib // 4}",
                        "conv=fsync", "status=none"], check=True)
        times.append(1000 * (time.monotonic() - start))
        os.remove(f"{folder}/dd")
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bench", default="build/bench/bench_checkpoint")
    for name, value in (("ranks", 2), ("mib", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dir", default="/tmp")
    a = parser.parse_args()
    import torch.multiprocessing as mp
    with tempfile.TemporaryDirectory(dir=a.dir) as folder:
        rows = {"dd conv=fsync, one process": dd(folder, a.mib, a.rounds)}
        mp.spawn(rank_main, nprocs=a.ranks,
                 args=(a.ranks, a.mib, a.rounds, folder, f"{folder}/times"))
        with open(f"{folder}/times", encoding="utf-8") as f:
            rows.update(json.load(f))
        print(subprocess.run([a.bench, "--ranks", str(a.ranks), "--mib", str(a.mib), "--rounds",
                              str(a.rounds), "--dir", folder], check=True,
                             stdout=subprocess.PIPE, universal_newlines=True).stdout)
    print("PyTorch and dd, ms: least, median")
    for name, times in rows.items():
        print(f"{name:28s} {min(times):10.1f} {statistics.median(times):10.1f}")


if __name__ == "__main__":
    main()
