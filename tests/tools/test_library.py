#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_library.py - drives libfsdp.so (make lib) from another language: ctypes structures are made
from the header's own text, its exports are the public functions, and a model trains. Prints the
lines of the other tests. FSDP_BUILD names the build directory."""
import ctypes as C
import glob
import os
import re
import subprocess
import sys

from harness import Skip, check, run, sh

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
LIBRARY = os.path.join(ROOT, os.environ.get("FSDP_BUILD", "build"), "libfsdp.so")
SIMPLE = {"int": C.c_int, "float": C.c_float, "double": C.c_double, "size_t": C.c_size_t,
          "int8_t": C.c_int8, "uint8_t": C.c_uint8, "int32_t": C.c_int32, "uint32_t": C.c_uint32,
          "int64_t": C.c_int64, "uint64_t": C.c_uint64}


class Header:
    """Constants and structs of the declarations part of headers, comments removed."""

    def __init__(self, *names):
        text = ""
        for name in names:
            with open(os.path.join(ROOT, name), encoding="utf-8") as f:
                text += f.read().split("#if defined(FSDP_IMPLEMENTATION)")[0]
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        self.text = re.sub(r"//[^\n]*", "", text)
        self.constants = {n: int(v) for n, v in re.findall(r"#define (FSDP_MAX_\w+) +(\d+)", text)}
        for name, items in re.findall(r"#define FSDP_(\w+)_LIST\(X\)((?:.*\\\n)*.*)", text):
            self.constants[f"FSDP_{name}_COUNT"] = len(re.findall(r"\bX\(", items))
        for name, value in re.findall(r"X\((\w+), (\d+), \d+, [01]\)", text):
            self.constants["FSDP_" + name] = int(value)
        for name, value in re.findall(r"\b(FSDP_(?:RESHARD|STATE|STORAGE)_\w+) = (-?\d+)", text):
            self.constants[name] = int(value)
        for name, value in re.findall(r"X\((OK|ERR_\w+), (\d+),", text):
            self.constants["FSDP_" + name] = int(value)
        for name, base, more in re.findall(r"\b(FSDP_\w+_MAX) = (FSDP_\w+) \+ (\d+)", text):
            if base in self.constants:
                self.constants[name] = self.constants[base] + int(more)
        self.types = dict(SIMPLE, fsdp_dtype=C.c_int32, fsdp_redop=C.c_int32)

    def struct(self, name):
        if name in self.types:
            return self.types[name]
        pattern = r"\bstruct %s \{(.*?)\n\}" % name
        body = re.search(pattern, self.text, re.S).group(1)
        fields = []
        for line in body.split(";"):
            line = " ".join(line.split())
            if not line:
                continue
            if "(*" in line:  # a function pointer
                fields.append((re.search(r"\(\*(\w+)\)", line).group(1), C.c_void_p))
                continue
            kind, rest = re.match(r"(?:const )?(?:struct )?(\w+) (.*)", line).groups()
            for item in rest.split(","):
                fields.append(self.field(kind, item.strip()))
        self.types[name] = type(name, (C.Structure,), {"_fields_": fields})
        return self.types[name]

    def field(self, kind, item):
        name, size = re.match(r"\**(\w+)(?:\[(\w+)\])?$", item).groups()
        if item.startswith("*"):
            one = C.c_char_p if kind == "char" else C.c_void_p
        else:
            one = self.struct(kind)
        if size:
            one = one * (int(size) if size.isdigit() else self.constants[size])
        return name, one

    def functions(self):
        return re.findall(r"FSDP_API[^;{]*?\b(fsdp_\w+)\(", self.text)


class Fsdp:
    def __init__(self):
        if not os.path.exists(LIBRARY):
            raise Skip("no libfsdp.so: run make lib")
        self.h = Header("fsdp.h", "src/core/backend.h")
        self.lib = C.CDLL(LIBRARY)
        for name in ("fsdp_last_error", "fsdp_status_name", "fsdp_dtype_name", "fsdp_unit_name"):
            getattr(self.lib, name).restype = C.c_char_p
        self.lib.fsdp_data.restype = self.lib.fsdp_grad.restype = C.c_void_p
        self.lib.fsdp_dtype_size.restype = C.c_size_t
        self.lib.fsdp_view_index.restype = C.c_int64
        self.lib.fsdp_model_destroy.restype = None
        for name in self.h.constants:
            setattr(self, name[5:], self.h.constants[name])

    def new(self, struct, /, **fields):
        return self.h.struct(struct)(**fields)

    def ok(self, status, world=None):
        if status:
            raise AssertionError(f"status {status}: {self.lib.fsdp_last_error(world).decode()}")

    def refused(self, status, world, word):
        text = self.lib.fsdp_last_error(world).decode()
        check(status == self.ERR_INVALID_ARG and word in text, f"status {status}: {text}")

    def world(self, **fields):
        world = C.c_void_p()
        desc = self.new("fsdp_world_desc", world_size=1, log_level=4, comm_threads=-1)
        for name, value in fields.items():
            setattr(desc, name, value)
        self.ok(self.lib.fsdp_init(C.byref(desc), C.byref(world)))
        return world


def check_exports(library):
    """The library exports what a header declares as FSDP_API, with the backends that it has."""
    names = set(sh(f"nm -D --defined-only {library} | awk '{{print $3}}'").split())
    backends = ["host_gemm"] + [b for b in ("shm", "gloo", "nccl") if f"fsdp_{b}_comm_ops" in names]
    if "nccl" in backends:
        backends.append("cuda")
    declared = set(Header(*glob.glob(f"{ROOT}/fsdp*.h"), *glob.glob(f"{ROOT}/src/*/*.h"),
                          *(f"backends/fsdp_{b}.h" for b in backends)).functions())
    check(len(declared) > 250, f"only {len(declared)} declarations were found")
    check(not declared - names, f"declared and not exported: {sorted(declared - names)}")
    check(not names - declared, f"exported and not declared: {sorted(names - declared)}")
    return backends


def test_exports():
    Fsdp()  # skips without the library
    check_exports(LIBRARY)


def test_soname():
    """Below 1.0 a minor version is an ABI of its own."""
    f = Fsdp()
    with open(os.path.join(ROOT, "fsdp.h"), encoding="utf-8") as text:
        version = re.findall(r"^#define FSDP_VERSION_\w+ (\d+)", text.read(), re.M)
    abi = "libfsdp.so." + ".".join(version[:2])
    check(f"soname: [{abi}]" in sh(f"readelf -d {LIBRARY}"), f"the soname is not {abi}")
    check(C.CDLL(os.path.join(os.path.dirname(LIBRARY), abi))._handle == f.lib._handle, abi)


def test_structs():
    """A size that is too large is refused and the right one is not: the layouts agree."""
    f = Fsdp()
    world = C.c_void_p()
    for extra, good in ((0, True), (8, False)):
        desc = f.new("fsdp_world_desc", world_size=1, log_level=4)
        desc.size = C.sizeof(desc) + extra
        status = f.lib.fsdp_init(C.byref(desc), C.byref(world))
        check((status == 0) == good, f"size {desc.size}: status {status}")
        if good:
            f.ok(f.lib.fsdp_shutdown(world))
    desc = f.new("fsdp_world_desc", world_size=1, log_level=4, end_canary=7)
    f.refused(f.lib.fsdp_init(C.byref(desc), C.byref(world)), None, "canary")
    check(not world.value, "a world in spite of the failure")


def test_pure_functions():
    f = Fsdp()
    r = f.new("fsdp_range")
    f.ok(f.lib.fsdp_shard_range(C.c_int64(10), 4, 3, C.byref(r)))
    check((r.start, r.count, r.padded) == (9, 1, 3), "shard_range")
    check(f.lib.fsdp_dtype_size(f.BF16) == 2 and f.lib.fsdp_dtype_name(f.F64) == b"f64", "dtypes")
    check(f.lib.fsdp_status_name(f.ERR_TIMEOUT) == b"FSDP_ERR_TIMEOUT", "status names")
    src, dst = (C.c_float * 3)(1.0, -2.5, 3.0), (C.c_uint16 * 3)()
    f.ok(f.lib.fsdp_convert(dst, f.BF16, src, f.F32, C.c_int64(3)))
    check(list(dst) == [0x3F80, 0xC020, 0x4040], "bf16")


def make_model(f, world, **fields):
    model, unit = C.c_void_p(), C.c_void_p()
    desc = f.new("fsdp_model_desc", **fields)
    f.ok(f.lib.fsdp_model_create(world, C.byref(desc), C.byref(model)), world)
    params = (f.h.struct("fsdp_param_desc") * 2)()
    params[0].name, params[0].ndim, params[0].user = b"weight", 2, 42
    params[0].shape[0], params[0].shape[1] = 3, 4
    params[1].name, params[1].ndim, params[1].shape[0] = b"bias", 1, 3
    desc = f.new("fsdp_unit_desc", name=b"layer", params=C.cast(params, C.c_void_p), num_params=2)
    f.ok(f.lib.fsdp_fully_shard(model, C.byref(desc), C.byref(unit)), world)
    return model, unit


def test_training():
    f = Fsdp()
    world = f.world()
    model, unit = make_model(f, world)
    view_type = f.h.struct("fsdp_param_view")
    seen = []

    def fill(_, block):
        v = block.contents
        seen.append((v.name, v.user, list(v.shape[: v.ndim])))
        data = C.cast(v.data, C.POINTER(C.c_float))
        for k in range(v.numel):
            data[k] = f.lib.fsdp_view_index(block, C.c_int64(k)) + 100 * v.index

    callback = C.CFUNCTYPE(None, C.c_void_p, C.POINTER(view_type))(fill)
    f.ok(f.lib.fsdp_init_params(model, callback, None), world)
    check(seen == [(b"weight", 42, [3, 4]), (b"bias", None, [3])], str(seen))
    check(f.lib.fsdp_num_params(model) == 2 and f.lib.fsdp_unit_name(unit) == b"layer", "names")
    for step in range(3):
        f.ok(f.lib.fsdp_pre_forward(unit), world)
        data = C.cast(f.lib.fsdp_data(unit, 0), C.POINTER(C.c_float))
        check([data[k] for k in range(12)] == [k - step for k in range(12)], f"step {step}")
        f.ok(f.lib.fsdp_post_forward(unit), world)
        check(f.lib.fsdp_unit_state(unit) == f.STATE_IDLE, "state")
        f.ok(f.lib.fsdp_pre_backward(unit), world)
        grad = C.cast(f.lib.fsdp_grad(unit, 0), C.POINTER(C.c_float))
        for k in range(12):
            grad[k] += 2.0
        f.ok(f.lib.fsdp_post_backward(unit), world)
        f.ok(f.lib.fsdp_finalize_backward(model), world)
        norm = C.c_double()
        f.ok(f.lib.fsdp_clip_grad_norm(model, C.c_double(1e9), C.byref(norm)), world)
        check(abs(norm.value - 48 ** 0.5) < 1e-12, f"norm {norm.value}")
        v, with_gradient = view_type(), []
        while f.lib.fsdp_next_param(model, C.byref(v)):
            if v.shard_grad:
                with_gradient.append(v.name)
                shard, g = (C.cast(p, C.POINTER(C.c_float)) for p in (v.shard, v.shard_grad))
                for k in range(v.numel):
                    shard[k] -= 0.5 * g[k]
        check(with_gradient == [b"weight"], str(with_gradient))
        f.ok(f.lib.fsdp_params_changed(model), world)
        f.ok(f.lib.fsdp_zero_grad(model), world)
    memory = f.new("fsdp_memory")
    f.ok(f.lib.fsdp_model_memory(model, C.byref(memory)), world)
    check(memory.unsharded_bytes == 2 * 4 * 15 and memory.total_bytes > 0, "memory")
    full = (C.c_float * 12)()
    f.ok(f.lib.fsdp_param_full(unit, 0, full), world)
    check(list(full) == [k - 3.0 for k in range(12)], "param_full")
    f.ok(f.lib.fsdp_shutdown(world))


def test_errors():
    f = Fsdp()
    world = f.world()
    model, unit = make_model(f, world)
    status = f.lib.fsdp_post_forward(unit)
    text = f.lib.fsdp_last_error(world).decode()
    check(status == f.ERR_INVALID_STATE and "layer" in text and "pre_forward" in text, text)
    f.refused(f.lib.fsdp_param_full(unit, 9, None), world, "parameter 9")
    bad = C.c_void_p()
    f.refused(f.lib.fsdp_model_create(world, C.byref(f.new("fsdp_model_desc", param_dtype=77)),
                                      C.byref(bad)), world, "param_dtype is 77")
    check(f.lib.fsdp_finalize_backward(model) == f.ERR_INVALID_STATE, "the first failure again")
    f.ok(f.lib.fsdp_shutdown(world))


def linear_step(weight, x, y):
    """The gradient of |weight x - y|^2 / 2 by weight, row by row in one list."""
    error = [sum(w * v for w, v in zip(weight[4 * i: 4 * i + 4], x)) - y[i] for i in range(3)]
    return [e * v for e in error for v in x]


def rank_main(f, rank, size, job):
    """One of several processes: a linear layer learns for one step, each rank from its own input. All
    numbers are exact in f32, and compared with those that Python computes."""
    world = f.world(rank=rank, world_size=size, job=job.encode(), timeout_ms=20000)
    value = (C.c_double * 1)(rank + 1.0)
    f.ok(f.lib.fsdp_all_reduce(world, None, value, C.c_int64(1), f.F64, 0), world)
    check(value[0] == size * (size + 1) / 2, f"all_reduce gives {value[0]}")
    model, unit = make_model(f, world)
    weight = [float(k) for k in range(12)]
    full = (C.c_float * 12)(*weight)
    f.ok(f.lib.fsdp_param_load(unit, 0, full), world)
    f.ok(f.lib.fsdp_pre_forward(unit), world)
    gathered = C.cast(f.lib.fsdp_data(unit, 0), C.POINTER(C.c_float))
    check(gathered[:12] == weight, f"gathered {gathered[:12]}")
    f.ok(f.lib.fsdp_post_forward(unit), world)
    f.ok(f.lib.fsdp_pre_backward(unit), world)
    grads = [linear_step(weight, [r + 1.0, 2.0, -r, 1.0], [r, 2.0 * r, 3.0]) for r in range(size)]
    grad = C.cast(f.lib.fsdp_grad(unit, 0), C.POINTER(C.c_float))
    for k in range(12):
        grad[k] += grads[rank][k]
    f.ok(f.lib.fsdp_post_backward(unit), world)
    f.ok(f.lib.fsdp_finalize_backward(model), world)
    mean = [sum(g) / size for g in zip(*grads)]
    view, rows = f.h.struct("fsdp_param_view")(), 0
    while f.lib.fsdp_next_param(model, C.byref(view)):
        if view.index == 0:
            shard, g = (C.cast(p, C.POINTER(C.c_float)) for p in (view.shard, view.shard_grad))
            places = [f.lib.fsdp_view_index(C.byref(view), C.c_int64(k)) for k in range(view.numel)]
            check([g[k] for k in range(view.numel)] == [mean[at] for at in places], f"{places}")
            for k in range(view.numel):
                shard[k] -= 0.5 * g[k]
            rows += view.numel
    check(rows == (8, 4)[rank], f"rank {rank} has {rows} elements of 3 x 4")
    f.ok(f.lib.fsdp_params_changed(model), world)
    f.ok(f.lib.fsdp_param_full(unit, 0, full), world)
    check(list(full) == [w - 0.5 * g for w, g in zip(weight, mean)], f"learned {list(full)}")
    f.ok(f.lib.fsdp_shutdown(world))


def test_processes():
    Fsdp()  # skips without the library
    job = f"library-{os.getpid()}"
    ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(r), "2", job],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for r in range(2)]
    for rank, process in enumerate(ranks):
        output = process.communicate(timeout=60)[0].decode()
        check(process.returncode == 0, f"rank {rank}: {output}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Fsdp(), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        run("library", globals())
