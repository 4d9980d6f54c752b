# SPDX-License-Identifier: MIT
"""Golden data for DTensor: planning, values of redistribute, sharding propagation, tensor parallel modules, FSDP+TP training.

Used by generate.py (kinds redist_plan, redist, prop, tp, train_tp); formats: README.md.
"""

import itertools, math, re
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _redistribute as redist
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from cases import Rng
import logging

for name in ("torch.distributed.tensor._redistribute", "torch._logging._internal", "torch.distributed.tensor"):
    logging.getLogger(name).setLevel(logging.ERROR)  # advice about flattened meshes

R, P, Sh = Replicate, Partial, Shard
OPS = {"sum": 0, "avg": 1, "max": 2, "min": 3}


def triple(p, ndim=None):
    """0 0 0 Replicate, 1 D 0 Shard, 2 D F _StridedShard, 3 0 OP Partial."""
    if isinstance(p, _StridedShard):
        return [2, p.dim, p.split_factor]
    if isinstance(p, Shard):
        return [1, p.dim + (ndim if p.dim < 0 else 0), 0]
    return [0, 0, 0] if isinstance(p, Replicate) else [3, 0, OPS[p.reduce_op]]


def triples(ps, ndim=None):
    return [v for p in ps for v in triple(p, ndim)]


class Comms(TorchDispatchMode):
    """Every collective, in order: (dim name, kind, elements that go in, elements that come out)."""

    KINDS = {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_reduce": "all_reduce",
        "all_to_all_single": "all_to_all",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
    }

    def __init__(self, groups=None):
        super().__init__()
        self.rows, self.groups = [], groups or {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        out = func(*args, **kwargs)
        ns, name = func._overloadpacket._qualified_op_name.split("::")
        if ns in ("_c10d_functional", "c10d") and name in self.KINDS:
            flat = lambda a: [
                t for x in (a if isinstance(a, (list, tuple)) else [a]) for t in (flat(x) if isinstance(x, (list, tuple)) else [x])
            ]
            tensors = [t for t in flat(list(args)) if isinstance(t, torch.Tensor)]
            outs = [t for t in flat(out) if isinstance(t, torch.Tensor)]
            if ns == "c10d" and name != "allreduce_":
                n_out, n_in = tensors[0].numel(), tensors[1].numel()  # (output, input, group)
            else:
                n_in = tensors[0].numel()
                n_out = outs[0].numel() if outs else n_in
            text = " ".join(str(a) for a in list(args) + list(kwargs.values()) if isinstance(a, str))
            group = next((g for g in self.groups if g in text.split()), None)
            if group is None:
                pg = next((a for a in args if isinstance(a, (dist.ProcessGroup, torch._C.ScriptObject))), None)
                try:
                    pg = dist.ProcessGroup.unbox(pg) if isinstance(pg, torch._C.ScriptObject) else pg
                    group = pg.group_name if pg is not None else None
                except Exception:
                    group = None
            self.rows.append((self.groups.get(group, "-"), self.KINDS[name], n_in, n_out))
        return out


def compact(values):
    """Integers as such, other numbers as C hex floats without the zeros at their end."""
    return [str(int(v)) if v == int(v) else re.sub(r"\.?0*p", "p", float(v).hex()) for v in values]


def counts(rows):
    kinds = sorted({r[1] for r in rows})
    return [len(kinds)] + [x for k in kinds for x in (k, sum(r[1] == k for r in rows))]


# ---- redist_plan.txt: what PyTorch's two planners choose, and what they think that it costs ------------------------------


def default_order(placements):
    return DTensorSpec.compute_default_shard_order(tuple(placements))


def order_of(placements, order):
    """For each mesh dim its place among those that cut the same tensor dim, in the order of application; -1: none."""
    out = [-1] * len(placements)
    for e in order:
        for k, m in enumerate(e.mesh_dims):
            out[m] = k
    return out


def random_order(rng, placements):
    dims = {}
    for m, p in enumerate(placements):
        if isinstance(p, Shard):
            dims.setdefault(p.dim, []).append(m)
    for v in dims.values():
        for i in range(len(v) - 1, 0, -1):
            j = rng.below(i + 1)
            v[i], v[j] = v[j], v[i]
    return tuple(ShardOrderEntry(tensor_dim=d, mesh_dims=tuple(v)) for d, v in sorted(dims.items()))


def gen_redist_plan(outdir, tools):
    o, rng = tools.Out(outdir, "redist_plan.txt", "redist_plan"), Rng(71)
    jobs = [((2, 2), (24, 20), 999), ((4, 2), (64, 32), 60), ((2, 2, 2), (16, 24, 8), 110), ((2, 8), (4096, 1024), 40)]
    for mesh_shape, shape, most in jobs:
        with tools.fake_world(0, math.prod(mesh_shape)):
            mesh = init_device_mesh("cpu", mesh_shape)
            meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
            kinds = [R()] + [Sh(d) for d in range(len(shape))]
            pairs = [
                (a, b, False)
                for a in itertools.product(kinds + [P()], repeat=len(mesh_shape))
                for b in itertools.product(kinds, repeat=len(mesh_shape))
                if a != b
            ]
            if len(pairs) > most:
                pairs = [rng.pick(pairs) for _ in range(most)]
            pairs += [(rng.pick(pairs)[0], rng.pick(pairs)[1], True) for _ in range(most // 3)]
            o.case("x".join(map(str, mesh_shape)))
            o.line("mesh", len(mesh_shape), mesh_shape)
            o.line("tensor", len(shape), shape)
            o.line("bytes", 4 * math.prod(shape))
            topo = redist.one_step_redistribute_cost.__globals__["MeshTopoInfo"].build_from_mesh(mesh)
            o.line("topology", *[float(v) for v in topo.mesh_dim_bandwidth], *[float(v) for v in topo.mesh_dim_latency])
            cost_of = redist.one_step_redistribute_cost.__globals__["_compute_placement_transition_cost"]
            seen = set()
            for a, b, shuffled in pairs:
                oa, ob = (random_order(rng, a), random_order(rng, b)) if shuffled else (default_order(a), default_order(b))
                if (a, b, oa, ob) in seen or (a == b and oa == ob):
                    continue
                seen.add((a, b, oa, ob))
                src, dst = DTensorSpec(mesh, a, meta, shard_order=oa), DTensorSpec(mesh, b, meta, shard_order=ob)
                row = [triples(a), order_of(a, oa), triples(b), order_of(b, ob)]
                for graph in (False, True):
                    if not graph and shuffled:
                        row += ["-"]
                        continue
                    planner = redist.DTensorRedistributePlanner(mesh, meta)
                    steps = (
                        planner.generate_graph_based_transform_infos(src, dst, shape)
                        if graph
                        else planner.generate_greedy_transform_infos(src, dst)
                    )
                    cost, cur = 0.0, list(a)
                    for s in steps:
                        shards = math.prod(mesh.size(m) for m, p in enumerate(cur) if isinstance(p, Shard))
                        gb = 4 * math.prod(shape) / shards / 1024 / 1024 / 1024
                        cost += cost_of(*s.src_dst_placements, topo, s.mesh_dim, gb)[0]
                        cur[s.mesh_dim] = s.src_dst_placements[1]
                    row += [float(cost), len(steps)] + [[s.mesh_dim] + triples(s.src_dst_placements) for s in steps]
                flat = []
                for x in row:
                    flat += x if isinstance(x, list) else [x]
                o.line("pair", *flat)
    o.close()


# ---- redist.txt: values -----------------------------------------------------------------------------------------------


def cut(t, placements, order, mesh, coord):
    """What a rank holds: nested chunks in the order of application; Partial: the whole, (coordinate + 1) times."""
    for e in order:
        for m in e.mesh_dims:
            n = mesh.size(m)
            size = -(-t.shape[e.tensor_dim] // n)
            lo = min(coord[m] * size, t.shape[e.tensor_dim])
            t = t.narrow(e.tensor_dim, lo, min(size, t.shape[e.tensor_dim] - lo))
    t = t.clone().contiguous()
    for m, p in enumerate(placements):
        if isinstance(p, Partial):
            t = t * (coord[m] + 1)
    return t


def redist_rank(rank, size, jobs):
    res = []
    for mesh_shape, shape, a, b, oa, ob in jobs:
        mesh = init_device_mesh("cpu", mesh_shape)
        full = torch.arange(float(math.prod(shape))).view(shape)
        local = cut(full, a, oa, mesh, mesh.get_coordinate())
        meta = TensorMeta(torch.Size(shape), full.stride(), full.dtype)
        src, dst = DTensorSpec(mesh, a, meta, shard_order=oa), DTensorSpec(mesh, b, meta, shard_order=ob)
        with Comms() as log:
            out = redist.redistribute_local_tensor(local, src, dst, is_explicit=True)
        res.append((local.flatten().tolist(), out.contiguous().flatten().tolist(), [r[1:] for r in log.rows], list(out.shape)))
    return res


def gen_redist(outdir, tools):
    o, rng = tools.Out(outdir, "redist.txt", "redist"), Rng(72)
    meshes = {4: [(4,), (2, 2)], 6: [(3, 2), (2, 3)], 8: [(2, 2, 2), (2, 4)]}
    for size, shapes in meshes.items():
        jobs = []
        for mesh_shape in shapes:
            for k in range(24 if size < 8 else 30):
                shape = tuple(rng.pick([1, 2, 3, 4, 5, 6, 7, 8, 9]) for _ in range(rng.pick([1, 2, 2, 3])))
                dims = [Sh(d) for d in range(len(shape))]
                op = rng.pick(["sum", "sum", "sum", "avg", "max", "min"])
                a = tuple(rng.pick([R(), P(op)] + dims * 2) for _ in mesh_shape)
                b = tuple(rng.pick([R()] + dims * 2) for _ in mesh_shape)
                if rng.chance(12):  # an explicit Shard -> Partial(sum)
                    a = tuple(R() if isinstance(p, Partial) else p for p in a)
                    b = tuple(P() if isinstance(p, Shard) and rng.chance(70) else q for p, q in zip(a, b))
                shuffled = rng.chance(40) and not any(isinstance(p, Partial) for p in b)
                oa, ob = (random_order(rng, a), random_order(rng, b)) if shuffled else (default_order(a), default_order(b))
                if a != b or oa != ob:
                    jobs.append((mesh_shape, shape, a, b, oa, ob))
        ranks = tools.gloo_world(size, redist_rank, jobs)
        for k, (mesh_shape, shape, a, b, oa, ob) in enumerate(jobs):
            o.case(f"redist_{size}_{k}")
            o.line("mesh", len(mesh_shape), mesh_shape)
            o.line("tensor", len(shape), shape)
            o.line("from", triples(a))
            o.line("order_from", order_of(a, oa))
            o.line("to", triples(b))
            o.line("order_to", order_of(b, ob))
            for row in ranks[0][k][2]:
                o.line("comm", *row)
            for r in range(size):
                o.line("after", r, ranks[r][k][3], *compact(ranks[r][k][1]))
    o.close()


# ---- prop.txt: sharding propagation -----------------------------------------------------------------------------------


def prop_ops():
    n, k, m, b = (8, 12, 16, 4)
    ln = lambda x, w, c: F.layer_norm(x, (x.shape[-1],), w, c, 1e-5)
    return {
        "mm": (torch.mm, [(n, k), (k, m)]),
        "linear": (F.linear, [(n, k), (m, k), (m,)]),
        "bmm": (torch.bmm, [(b, n, k), (b, k, m)]),
        "mul": (torch.mul, [(n, k), (n, k)]),
        "add": (torch.add, [(n, k), (n, k)]),
        "add_row": (torch.add, [(n, k), (k,)]),
        "scale": (lambda x: x * 3.0, [(n, k)]),
        "sin": (torch.sin, [(n, k)]),
        "sum": (torch.sum, [(n, k)]),
        "sum0": (lambda x: x.sum(0), [(n, k)]),
        "mean1": (lambda x: x.mean(1), [(n, k)]),
        "softmax": (lambda x: torch.softmax(x, -1), [(n, k)]),
        "layer_norm": (ln, [(n, k), (k,), (k,)]),
        "transpose": (lambda x: x.t(), [(n, k)]),
        "view": (lambda x: x.view(x.shape[0], 2, x.shape[1] // 2), [(n, k)]),
        "flatten": (lambda x: x.view(-1), [(n, k)]),
        "cat0": (lambda x, y: torch.cat([x, y], 0), [(n, k), (n, k)]),
        "slice0": (lambda x: x[1:3], [(n, k)]),
        "split1": (lambda x: torch.split(x, 5, 1)[1], [(n, k)]),
        "embedding": (lambda w, i: F.embedding(i, w), [(m, k), (n,)]),
    }


def gen_prop(outdir, tools):
    o, rng = tools.Out(outdir, "prop.txt", "prop"), Rng(73)
    for mesh_shape in [(2,), (2, 2)]:
        with tools.fake_world(0, math.prod(mesh_shape)):
            mesh = init_device_mesh("cpu", mesh_shape)
            for name, (fn, shapes) in prop_ops().items():
                o.case(name + "_" + "x".join(map(str, mesh_shape)))
                o.line("mesh", len(mesh_shape), mesh_shape)
                o.line("op", name, len(shapes))
                for s in shapes:
                    o.line("in", len(s), s)
                each = [[R()] + [Sh(d) for d in range(len(s))] + ([P()] if name not in ("embedding",) else []) for s in shapes]
                combos = list(itertools.product(*[itertools.product(e, repeat=len(mesh_shape)) for e in each]))
                if len(combos) > 60:
                    combos = [rng.pick(combos) for _ in range(36 if len(mesh_shape) > 1 else 60)]
                for combo in dict.fromkeys(combos):
                    ins = []
                    for s, pl in zip(shapes, combo):
                        is_ids = name == "embedding" and s is shapes[1]
                        t = torch.zeros(s, dtype=torch.int64 if is_ids else torch.float32)
                        loc = distribute_tensor(t, mesh, [R() if isinstance(p, Partial) else p for p in pl], src_data_rank=None).to_local()
                        ins.append(DTensor.from_local(loc, mesh, pl, run_check=False, shape=torch.Size(s), stride=t.stride()))
                    flat = [v for pl in combo for v in triples(pl)]
                    try:
                        with Comms() as log:
                            out = fn(*ins)
                        pl = out.placements
                        mask = any(type(p).__name__ == "_MaskPartial" for p in pl)
                        o.line("prop", flat, triples(pl), int(mask), sum(max(r[2:]) for r in log.rows), *counts(log.rows))
                    except Exception as e:
                        o.line("refused", flat, type(e).__name__)
    o.close()


# ---- tp.txt: the styles, one module at a time --------------------------------------------------------------------------


class Attn(nn.Module):
    """FakeAttention: q + k + v, then o; no bias."""

    def __init__(self, d):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x):
        return self.wo(self.wq(x) + self.wk(x) + self.wv(x))


def set_values(module, seed, fill):
    info = []
    for k, (name, p) in enumerate(sorted(module.named_parameters())):
        p.data = fill(seed + k, p.shape, 2.0)
        info.append((name, seed + k, 2.0, list(p.shape)))
    return info


def tp_rank(rank, size, cfg, fill):
    mesh = init_device_mesh("cpu", (size,))
    kind, seed = cfg["kind"], cfg["seed"]
    torch.manual_seed(0)
    res = {}
    if kind in ("embed_col", "embed_row"):
        mod = nn.Embedding(*cfg["dims"])
    elif kind == "seq":
        mod = nn.LayerNorm(cfg["dims"][0])
    elif kind == "attn":
        mod = Attn(cfg["dims"][0])
    else:
        mod = nn.Linear(*cfg["dims"])
    res["params"] = set_values(mod, seed, fill)
    a, b = cfg.get("input", R()), cfg.get("output")
    kw = {} if b is None else {"output_layouts": b}
    if kind in ("colwise", "embed_col"):
        mod = parallelize_module(mod, mesh, ColwiseParallel(input_layouts=a, use_local_output=False, **kw))
    elif kind in ("rowwise", "embed_row"):
        mod = parallelize_module(mod, mesh, RowwiseParallel(input_layouts=a, use_local_output=False, **kw))
    elif kind == "seq":
        mod = parallelize_module(mod, mesh, SequenceParallel(sequence_dim=0))
    else:
        mod = parallelize_module(
            mod,
            mesh,
            {
                "": PrepareModuleInput(input_layouts=a, desired_input_layouts=R()),
                **{n: ColwiseParallel(use_local_output=False) for n in ("wq", "wk", "wv")},
                "wo": RowwiseParallel(output_layouts=b, use_local_output=False),
            },
        )
    if "ids" in cfg:
        x = distribute_tensor(torch.tensor(cfg["ids"]), mesh, [a], src_data_rank=None)
    else:
        x = distribute_tensor(fill(seed + 50, cfg["x"], 2.0), mesh, [a], src_data_rank=None).requires_grad_(True)
    with Comms() as log:
        y = mod(x)
    res["fwd"] = log.rows
    d = distribute_tensor(fill(seed + 60, y.shape, 2.0), mesh, [R() if isinstance(y.placements[0], Partial) else y.placements[0]], src_data_rank=None)
    with Comms() as log:
        y.backward(d)
    res["bwd"] = log.rows
    res["out"] = (triples(y.placements, y.ndim), list(y.shape), y.full_tensor().flatten().tolist())
    if "ids" not in cfg:
        g = x.grad
        res["dx"] = (triples(g.placements, g.ndim), None, g.full_tensor().flatten().tolist())
    res["grads"] = []
    for n, p in sorted(mod.named_parameters()):
        pl = p.placements
        gp = p.grad.placements
        res["grads"].append((n, triples(pl, p.ndim), triples(gp, p.ndim), p.grad.full_tensor().flatten().tolist()))
    return res


def loss_rank(rank, size, cfg, fill):
    mesh = init_device_mesh("cpu", (size,))
    N, C = cfg["dims"]
    x = distribute_tensor(fill(cfg["seed"], (N, C), 4.0), mesh, [Sh(1)], src_data_rank=None).requires_grad_(True)
    t = torch.tensor(cfg["targets"])
    w = fill(cfg["seed"] + 1, (C,), 1.0) + 1.0 if cfg.get("weight") else None
    wd = distribute_tensor(w, mesh, [R()], src_data_rank=None) if w is not None else None
    td = distribute_tensor(t, mesh, [R()], src_data_rank=None)
    with Comms() as log, loss_parallel():
        y = F.cross_entropy(x, td, weight=wd, reduction=cfg["reduction"], ignore_index=cfg.get("ignore", -100))
    fwd = log.rows
    full = y.full_tensor()
    with Comms() as log, loss_parallel():
        if cfg["reduction"] == "none":
            y.backward(distribute_tensor(fill(cfg["seed"] + 2, y.shape, 2.0), mesh, [R()], src_data_rank=None))
        else:
            y.backward()
    return dict(fwd=fwd, bwd=log.rows, loss=full.detach().flatten().tolist(), grad=x.grad.full_tensor().flatten().tolist(), place=triples(x.grad.placements, 2))


def tp_cases():
    rng = Rng(74)
    T = [2, 3, 4]
    out, seed = [], 9000

    def add(**kw):
        nonlocal seed
        seed += 100
        out.append(dict(seed=seed, **kw))

    for t in T:
        i, o_, n = (6, 12, 12)
        if n % t:
            n = 2 * t
        add(kind="colwise", T=t, dims=(i, o_), x=(n, i))
        add(kind="colwise", T=t, dims=(i, o_), x=(n, i), input=Sh(0))
        add(kind="colwise", T=t, dims=(i, o_), x=(n, i), output=R())
        add(kind="rowwise", T=t, dims=(o_, i), x=(n, o_), input=Sh(1))
        add(kind="rowwise", T=t, dims=(o_, i), x=(n, o_), input=Sh(1), output=Sh(0))
        add(kind="rowwise", T=t, dims=(o_, i), x=(n, o_), input=R())
        add(kind="seq", T=t, dims=(i,), x=(n, i), input=Sh(0))
        V, D = (10, 8)
        ids = [rng.below(V) for _ in range(8)]
        add(kind="embed_col", T=t, dims=(V, D), ids=ids, input=R())
        add(kind="embed_row", T=t, dims=(V, D), ids=ids, input=R())
        add(kind="embed_row", T=t, dims=(V, D), ids=ids, input=R(), output=Sh(0))
        add(kind="embed_row", T=t, dims=(V, D), ids=ids, input=R(), output=Sh(1))
        d = 8
        if d % t == 0:
            add(kind="attn", T=t, dims=(d,), x=(4 * t, d), input=Sh(0), output=Sh(0))
    add(kind="colwise", T=3, dims=(4, 7), x=(5, 4))  # 7 = 3 + 3 + 1
    add(kind="rowwise", T=3, dims=(7, 4), x=(5, 7), input=Sh(1), output=Sh(0))  # 5 = 2 + 2 + 1
    add(kind="colwise", T=4, dims=(3, 2), x=(4, 3))  # two empty members
    for t in T[:2]:
        for red in ("mean", "sum", "none"):
            C, N = (11, 6)
            for opt in ({}, {"ignore": 2}, {"weight": 1}):
                if red == "none" and opt:
                    continue
                targets = [rng.below(C) for _ in range(N)]
                if "ignore" in opt:
                    targets[1] = 2
                add(kind="loss", T=t, dims=(N, C), targets=targets, reduction=red, **opt)
    return out


def gen_tp(outdir, tools):
    o = tools.Out(outdir, "tp.txt", "tp")
    for k, cfg in enumerate(tp_cases()):
        t = cfg["T"]
        is_loss = cfg["kind"] == "loss"
        try:
            ranks = tools.gloo_world(t, loss_rank if is_loss else tp_rank, cfg, tools.fill)
        except RuntimeError as e:
            print(f'  {cfg["kind"]}_{k}: left out: {e}')
            continue
        first = ranks[0]
        o.case(f'{cfg["kind"]}_{t}_{k}')
        o.line("mesh", 1, [t])
        if is_loss:
            N, C = cfg["dims"]
            o.line("loss", cfg["reduction"], N, C, cfg["seed"], cfg.get("ignore", -100), int(cfg.get("weight", 0)))
            o.line("targets", N, cfg["targets"])
            o.line("fwd", *counts(first["fwd"]))
            o.line("bwd", *counts(first["bwd"]))
            o.line("value", len(first["loss"]), *compact(first["loss"]))
            o.line("dx", first["place"], len(first["grad"]), *compact(first["grad"]))
            continue
        o.line("style", cfg["kind"], triples([cfg.get("input", R())]), triples([cfg["output"]], 2) if "output" in cfg else "default")
        for name, seed, scale, shape in first["params"]:
            o.line("param", name, seed, scale, len(shape), shape)
        if "ids" in cfg:
            o.line("ids", len(cfg["ids"]), cfg["ids"])
        else:
            o.line("input", cfg["seed"] + 50, 2.0, len(cfg["x"]), cfg["x"])
        o.line("dout", cfg["seed"] + 60, 2.0, len(first["out"][1]), first["out"][1])
        for key in ("fwd", "bwd"):
            for _, kind, n_in, n_out in first[key]:
                o.line(key, kind, n_in, n_out)
        o.line("out", first["out"][0], len(first["out"][2]), *compact(first["out"][2]))
        if "dx" in first:
            o.line("dx", first["dx"][0], len(first["dx"][2]), *compact(first["dx"][2]))
        for name, pl, gp, v in first["grads"]:
            o.line("grad", name, pl, gp, len(v), *compact(v))
    o.close()


# ---- train_tp.txt: FSDP+TP, everything a DTensor, f32 --------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * self.weight


def softsign(z):
    return z / (1 + z.abs())


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm, self.net1, self.net2 = Scale(d), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return x + self.net2(softsign(self.net1(self.norm(x))))


class TpNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d, h, v = cfg["d"], cfg["h"], cfg.get("vocab")
        self.blocks = nn.ModuleList([Block(d, h) for _ in range(cfg["blocks"])])
        self.norm = Scale(d)
        if v:
            self.emb, self.head = nn.Embedding(v, d), nn.Linear(d, v, bias=False)

    def forward(self, x):
        if hasattr(self, "emb"):
            x = self.emb(x)
            # the gradient may come as Partial, which PyTorch 2.15 cannot bring back to the embedding's masked Partial
            x = DTensor.from_local(x.to_local(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
        for b in self.blocks:
            x = b(x)
        x = self.norm(x)
        return self.head(x) if hasattr(self, "head") else x


def names_of(model, cfg):
    rows = []
    for b in range(cfg["blocks"]):
        for n in ("norm.weight", "net1.weight", "net1.bias", "net2.weight", "net2.bias"):
            rows.append((b + 1, f"blocks.{b}.{n}"))
    if cfg.get("vocab"):
        rows.append((0, "emb.weight"))
    rows.append((0, "norm.weight"))
    if cfg.get("vocab"):
        rows.append((0, "head.weight"))
    return rows


def train_tp_rank(rank, size, cfg, seed, hypers, fill, make_opt):
    dp, tp = cfg["dp"], cfg["tp"]
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    tpm, groups = mesh["tp"], {mesh["dp"].get_group().group_name: "dp", mesh["tp"].get_group().group_name: "tp"}
    me, sp, res = mesh.get_local_rank("dp"), cfg.get("sp"), {}
    for hyper in hypers:
        model, info = TpNet(cfg), []
        named = dict(model.named_parameters())
        for n, (unit, name) in enumerate(names_of(model, cfg)):
            scale = 2.0 if named[name].ndim > 1 else 1.0
            base = 1.0 if "norm" in name else 0.0
            named[name].data = fill(seed + n, named[name].shape, scale) + base
            info.append([n, unit, name, seed + n, scale, base, list(named[name].shape)])
        seq = Sh(0) if sp else R()
        local = dict(use_local_output=False)
        plan = {}
        for b in range(cfg["blocks"]):
            plan[f"blocks.{b}.norm"] = SequenceParallel(sequence_dim=0)
            plan[f"blocks.{b}.net1"] = ColwiseParallel(input_layouts=seq, **local)
            plan[f"blocks.{b}.net2"] = RowwiseParallel(output_layouts=seq, **local)
        plan["norm"] = SequenceParallel(sequence_dim=0)
        if cfg.get("vocab"):
            plan["emb"] = RowwiseParallel(input_layouts=R(), output_layouts=seq, **local)
            plan["head"] = ColwiseParallel(input_layouts=seq, output_layouts=Sh(1), **local)
        if not sp:  # norms replicated: parameters are DTensors all the same
            for key in [k for k, v in plan.items() if isinstance(v, SequenceParallel)]:
                del plan[key]
                m = model.get_submodule(key)
                m.weight = nn.Parameter(DTensor.from_local(m.weight.data, tpm, [R()], run_check=False))
        parallelize_module(model, tpm, plan)
        tps = {n: triples(p.placements, p.ndim) for n, p in model.named_parameters()}
        dim = lambda p: Sh(cfg.get("fsdp_dim", 0) if p.ndim > 1 else 0)
        for b in model.blocks:
            fully_shard(b, mesh=mesh["dp"], shard_placement_fn=dim)
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=dim)
        params = dict(model.named_parameters())
        for row in info:
            row.append(tps[row[2]])
            row.append(triples(params[row[2]].placements, params[row[2]].ndim))
        opt, losses, norms = make_opt([params[r[2]] for r in info], hyper), [], []
        N, D = cfg["tokens"], cfg["d"]
        for step in range(cfg.get("steps", 6)):
            at = seed + 1000000 + 100000 * step + me
            with Comms(groups) as log:
                if cfg.get("vocab"):
                    ids = (fill(at, (2 * N,), 1.0) + 0.5).mul(cfg["vocab"]).floor().to(torch.int64)
                    y = model(distribute_tensor(ids[:N], tpm, [R()], src_data_rank=None))
                    with loss_parallel():
                        loss = F.cross_entropy(y, distribute_tensor(ids[N:], tpm, [R()], src_data_rank=None))
                        fwd = len(log.rows)
                        loss.backward()
                else:
                    x = distribute_tensor(fill(at, (N, D), 2.0), tpm, [seq], src_data_rank=None)
                    t = distribute_tensor(fill(at + 500, (N, D), 2.0), tpm, [seq], src_data_rank=None)
                    e = model(x) - t
                    loss = (e * e).sum() / (N * D)
                    fwd = len(log.rows)
                    loss.backward()
            if step == 0:
                res["comms"] = [("fwd",) + r for r in log.rows[:fwd]] + [("bwd",) + r for r in log.rows[fwd:]]
                model.reshard()
                params = dict(model.named_parameters())
                res["grad"] = [params[r[2]].grad.full_tensor().flatten().tolist() for r in info]
            losses.append(float(loss.full_tensor()))
            if "clip" in cfg:
                norm = nn.utils.clip_grad_norm_(model.parameters(), cfg["max_norm"], cfg["clip"])
                norms.append(float(norm.full_tensor()))
            opt.step()
            opt.zero_grad()
        params = dict(model.named_parameters())
        res[hyper[0]] = dict(loss=losses, norm=norms, final=[params[r[2]].full_tensor().flatten().tolist() for r in info])
        res["info"] = info
        res["local"] = [(list(params[r[2]].to_local().shape)) for r in info]
    return res


def train_tp_cases():
    return [
        dict(name="tp_2x2", dp=2, tp=2, blocks=2, d=10, h=16, tokens=6),
        dict(name="sp_2x2", dp=2, tp=2, blocks=2, d=10, h=16, tokens=6, sp=1),
        dict(name="sp_2x2_clip", dp=2, tp=2, blocks=1, d=6, h=8, tokens=6, sp=1, clip=2.0, max_norm=0.25),
        dict(name="tp_2x2_clip", dp=2, tp=2, blocks=1, d=6, h=8, tokens=4, clip=2.0, max_norm=0.125),
        dict(name="tp_1x2", dp=1, tp=2, blocks=1, d=6, h=8, tokens=4),
        dict(name="sp_1x3", dp=1, tp=3, blocks=1, d=6, h=9, tokens=6, sp=1),
        dict(name="tp_2x2_uneven", dp=2, tp=2, blocks=1, d=5, h=7, tokens=3),
        dict(name="sp_2x2_uneven", dp=2, tp=2, blocks=1, d=5, h=7, tokens=5, sp=1),
        dict(name="lm_2x2", dp=2, tp=2, blocks=1, d=6, h=8, tokens=6, vocab=12),
        dict(name="lm_sp_2x2", dp=2, tp=2, blocks=1, d=6, h=8, tokens=6, vocab=11, sp=1),
        dict(name="lm_sp_3x2_clip", dp=3, tp=2, blocks=1, d=4, h=6, tokens=4, vocab=10, sp=1, clip=2.0, max_norm=0.5),
        dict(name="tp_2x2_dim1", dp=2, tp=2, blocks=1, d=8, h=8, tokens=4, fsdp_dim=1),
    ]


def gen_train_tp(outdir, tools):
    o, seed = tools.Out(outdir, "train_tp.txt", "train_tp"), 40000
    for cfg in train_tp_cases():
        seed += 100
        size = cfg["dp"] * cfg["tp"]
        try:
            ranks = tools.gloo_world(size, train_tp_rank, cfg, seed, (tools.SGD, tools.ADAMW), tools.fill, tools.make_opt)
        except RuntimeError as e:
            print(f'  {cfg["name"]}: left out: {e}')
            continue
        first = ranks[0]
        o.case(cfg["name"])
        o.line("world", cfg["dp"], cfg["tp"])
        o.line("model", cfg["blocks"], cfg["tokens"], cfg["d"], cfg["h"], cfg.get("vocab", 0), cfg.get("sp", 0), cfg.get("fsdp_dim", 0))
        o.line("steps", cfg.get("steps", 6), seed + 1000000)
        if "clip" in cfg:
            o.line("clip", float(cfg["clip"]), float(cfg["max_norm"]))
        for n, unit, name, pseed, scale, base, shape, tpp, place in first["info"]:
            o.line("param", n, unit, name, pseed, float(scale), float(base), tpp, place, len(shape), shape)
        for n in range(len(first["info"])):
            for r in range(size):
                o.line("shape", n, r, ranks[r]["local"][n])
        for row in first["comms"]:
            o.line("comm", *row)
        for n, v in enumerate(first["grad"]):
            o.line("grad", n, len(v), *compact(v))
        for r in ranks:
            assert r["grad"] == first["grad"], cfg["name"]
        for hyper in (tools.SGD, tools.ADAMW):
            k = hyper[0]
            o.line("opt", k, *[float(v) for v in hyper[1:]])
            for step in range(cfg.get("steps", 6)):
                for d in range(cfg["dp"]):
                    o.line("loss", step, d, float(ranks[d * cfg["tp"]][k]["loss"][step]))
                if "clip" in cfg:
                    o.line("norm", step, float(first[k]["norm"][step]))
            for n, v in enumerate(first[k]["final"]):
                o.line("final", n, len(v), *compact(v))
    o.close()


KINDS = {
    "redist_plan": gen_redist_plan,
    "redist": gen_redist,
    "prop": gen_prop,
    "tp": gen_tp,
    "train_tp": gen_train_tp,
}
