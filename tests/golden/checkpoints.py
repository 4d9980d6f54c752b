# Golden checkpoints for the reader of fsdp_checkpoint.h, written by torch 2.15 (distributed checkpoint in its Hugging Face form)
# and transformers: small directories, whose numbers are closed-form.
# usage: checkpoints.py OUTDIR     (no GPU; about a minute)
# Tensor NAME holds fill(seed(NAME), shape, 1), rounded to its dtype; seed = FNV-1a 32 bits of the name. cases.txt lists them.
# SPDX-License-Identifier: MIT
import os, sys, json, shutil, warnings; warnings.filterwarnings('ignore')
import torch, torch.distributed as dist, torch.multiprocessing as mp
M = (1 << 64) - 1
def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & M; x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M; x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)
def seed(name):
    h = 0x811C9DC5
    for b in name.encode(): h = ((h ^ b) * 0x01000193) & 0xFFFFFFFF
    return h
def fill(name, shape, dtype):
    n = 1
    for s in shape: n *= s
    return torch.tensor([((mix((seed(name) + 0x9E3779B97F4A7C15 * i) & M) >> 40) / 16777216.0 - 0.5) for i in range(n)]).reshape(shape).to(dtype)
PARAMS = [('w', (37, 19), torch.float32, 0), ('b', (19,), torch.float32, 0), ('side', (5, 37), torch.float32, 1), ('tiny', (2,), torch.float32, 0), ('frozen', (7,), torch.bfloat16, 0), ('half', (3, 4, 5), torch.float16, 0), ('none', (0, 3), torch.float32, 0)]
def tensors():
    for l in range(2):
        for n, sh, dt, dim in PARAMS:
            f = 'layers.%d.%s' % (l, n); yield f, sh, dt, dim
            if n not in ('frozen', 'none'):
                yield 'optim.state.%s.exp_avg' % f, sh, torch.float32, dim
                yield 'optim.state.%s.exp_avg_sq' % f, sh, torch.float32, dim
def worker(r, w, out, case, port):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)); torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=r, world_size=w)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor, Shard, Replicate
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    name, shape, kind, consolidate = case
    mesh = init_device_mesh('cpu', shape, mesh_dim_names=('r', 's')[-len(shape):] if kind != 'tp' else ('dp', 'tp'))
    sd = {}
    for f, sh, dt, dim in tensors():
        if consolidate and (f.startswith('optim') or f.endswith('none')): continue
        pl = [Shard(dim)] if kind == 'fsdp' else [Replicate(), Shard(dim)] if kind == 'hsdp' else [Replicate()] if kind == 'ddp' else [Shard(0), Shard(len(sh) - 1)]
        sd[f] = distribute_tensor(fill(f, sh, dt), mesh, pl)
    for l in range(2):
        if not consolidate: sd['optim.state.layers.%d.w.step' % l] = torch.tensor(17.0 + l)
    d = os.path.join(out, name); dcp.save(sd, storage_writer=HuggingFaceStorageWriter(d, save_distributed=True, enable_consolidation=consolidate, fqn_to_index_mapping={k: 1 + i % 2 for i, k in enumerate(sorted(sd))} if consolidate else None))
    dist.destroy_process_group()
def main(out):
    cases = [('torch_fsdp_w1', (1,), 'fsdp', False), ('torch_fsdp_w3', (3,), 'fsdp', False), ('torch_fsdp_w4', (4,), 'fsdp', False), ('torch_hsdp_2x2', (2, 2), 'hsdp', False), ('torch_ddp_w2', (2,), 'ddp', False), ('torch_2d_2x2', (2, 2), 'tp', False), ('torch_consolidated', (2,), 'fsdp', True)]
    idx = open(os.path.join(out, 'cases.txt'), 'w'); idx.write('fsdp-golden 1 checkpoints\n')
    for i, c in enumerate(cases):
        shutil.rmtree(os.path.join(out, c[0]), ignore_errors=True); w = 1
        for s in c[1]: w *= s
        mp.spawn(worker, args=(w, out, c, 29600 + i), nprocs=w)
        if c[3]: shutil.rmtree(os.path.join(out, c[0], 'sharded'))
        files = sorted(os.listdir(os.path.join(out, c[0]))); idx.write('\ncase %s\nfiles %d %s\n' % (c[0], len(files), ' '.join(files)))
        for f, sh, dt, dim in tensors():
            if c[3] and (f.startswith('optim') or f.endswith('none')): continue
            idx.write('tensor %s %s %d %s\n' % (f, str(dt)[6:], len(sh), ' '.join(map(str, sh))))
        if not c[3]: idx.write('step layers.0.w 17\nstep layers.1.w 18\n')
    idx.close()
    from transformers import GPT2Config, GPT2LMHeadModel
    m = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=13, n_positions=6))
    with torch.no_grad():
        for k, p in m.named_parameters(): p.copy_(fill(k, p.shape, p.dtype))
    d = os.path.join(out, 'transformers_gpt2'); shutil.rmtree(d, ignore_errors=True); m.save_pretrained(d, max_shard_size='4KB')
if __name__ == '__main__':
    os.makedirs(sys.argv[1], exist_ok=True); main(sys.argv[1])
