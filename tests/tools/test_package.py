#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_package.py - the library as other projects get it: one header, make install and pkg-config,
cmake --install and find_package, add_subdirectory, FetchContent. Each test builds a program outside
of this tree, in a directory of its own, and runs it on one rank and on several: also the release
that make dist packs. The optimizer would take most of the time, and is left out, but by what runs
at night: long_*, and the commands of README.md as they stand there."""
import contextlib
import functools
import os
import re
import shutil
import tempfile

from harness import Skip, check, run, sh

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
CC = os.environ.get("CC") or "cc"
CXX = os.environ.get("CXX") or "c++"
# The test's programs must not find this tree, nor get variables of this make.
MINE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "DESTDIR", "CPATH", "C_INCLUDE_PATH")
CLEAN = {k: v for k, v in os.environ.items() if k not in MINE}
PROJECT = """cmake_minimum_required(VERSION 3.17)
project(user LANGUAGES %(languages)s)
%(get)s
add_executable(hello 01_hello.c)
target_link_libraries(hello PRIVATE %(target)s)
"""


def needs(*programs):
    """A test that is skipped where one of these programs is missing."""
    def decorate(test):
        @functools.wraps(test)
        def wrapped(*args):
            for name in programs:
                if not shutil.which(name):
                    raise Skip(f"no {name}")
            with tempfile.TemporaryDirectory() as folder, inside(folder):
                shutil.copy(os.path.join(ROOT, "examples/01_hello.c"), folder)
                test(*args)
        return wrapped
    return decorate


@contextlib.contextmanager
def inside(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def make(target):
    sh(f"make -s -C {ROOT} {target} BUILD={os.getcwd()}/make", env=CLEAN)


def single(*names):
    """These headers, each as one file."""
    make("single")
    for name in names:
        shutil.copy(f"make/single/{name}", ".")


def version():
    with open(os.path.join(ROOT, "fsdp.h"), encoding="utf-8") as f:
        return ".".join(re.findall(r"^#define FSDP_VERSION_\w+ (\d+)", f.read(), re.M))


def trains(program="./hello", backend=None):
    """The example learns, on one rank and on four, which see other data."""
    make("tools/fsdprun")
    more = {"FSDP_BACKEND": backend} if backend else {}
    first = []
    for launcher in ["", f"{ROOT}/tools/fsdprun -n 4 "]:
        out = sh(launcher + program, env=dict(CLEAN, **more))
        losses = [float(x) for x in re.findall(r"loss (\S+)", out)]
        check(len(losses) > 1 and losses[-1] < losses[0] / 2, f"$ {launcher}{program}\n{out}")
        first.append(losses[0])
    check(first[0] != first[1], f"four ranks have the loss of one: {first}")


def project(get, target="fsdp::fsdp", languages="C", flags=""):
    """Builds the example as a CMake project."""
    with open("CMakeLists.txt", "w", encoding="utf-8") as f:
        f.write(PROJECT % {"get": get, "target": target, "languages": languages})
    shutil.rmtree("build", ignore_errors=True)
    sh(f"cmake -S . -B build {flags} && cmake --build build", env=CLEAN)


def need_gloo():
    try:
        sh(f"echo '#include <gloo/transport/tcp/device.h>' | {CXX} -E -x c++ -")
    except AssertionError:
        raise Skip("no libgloo-dev")


def blocks(kind, document="README.md"):
    """Texts of a document's blocks of this kind, in their order."""
    with open(f"{ROOT}/{document}", encoding="utf-8") as f:
        return re.findall(rf"^```{kind}\n(.*?)^```", f.read(), re.M | re.S)


def fast(commands):
    """The same commands without the optimizer."""
    return commands.replace("-O2", "-O0")


@needs()
def test_readme(edit=fast):
    """Its first commands, which need nothing but what they name."""
    for name in os.listdir(ROOT):
        if name not in ("build", "hello"):
            os.symlink(f"{ROOT}/{name}", name)
    out = sh(f"set -e\n{edit(blocks('sh')[0])}", env=CLEAN)
    check(out.count("step 200  loss") == 2, out)


def long_readme():
    test_readme(str)


# The parts that README leaves to the reader.
TRAINER = """#include <math.h>
#include <stdio.h>
#include "fsdp_optim.h"
enum { L = 3, C = 64 };
static void layer_forward(float *y, const float *x, const float *w, const float *b) {
    for (int i = 0; i < C; i++) {
        y[i] = x[i] + b[i];
        for (int j = 0; j < C; j++) y[i] += w[i * C + j] * x[j];
    }
}
static void layer_backward(float *dx, const float *dy, const float *x, const float *w, float *dw,
                           float *db) {
    for (int i = 0; i < C; i++) dx[i] = dy[i];
    for (int i = 0; i < C; i++) {
        db[i] += dy[i];
        for (int j = 0; j < C; j++) dw[i * C + j] += dy[i] * x[j], dx[j] += w[i * C + j] * dy[i];
    }
}
%(init)s
int main(void) {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *h[L];
    fsdp_adamw *opt;
    float x[L + 1][C], dx[L + 1][C], first = 0, last = 0;
%(setup)s
    for (int step = 0; step < 50; step++) {
        for (int i = 0; i < C; i++) x[0][i] = (float)((i + fsdp_rank(world)) %% 5) / 5;
%(loop)s
    }
    printf("%%s\\n", last < first / 2 ? "learned" : "not learned");
    return fsdp_shutdown(world) != FSDP_OK;
}
"""
LOSS = """last = 0;
for (int i = 0; i < C; i++) dx[L][i] = x[L][i] - 1, last += dx[L][i] * dx[L][i];
if (step == 0) first = last;
"""


@needs()
def test_readme_program(edit=fast):
    """Its blocks make a program, in C and in C++, by its commands."""
    implementation, init = blocks("c file")
    loop, setup = blocks("c fragment")
    loop = re.sub(r"^// here: your loss.*", LOSS, loop, flags=re.M)
    os.symlink(ROOT, "fsdp")
    commands = f"set -e\n{edit(blocks('sh')[1])}"
    for run_them, end in ((commands, "c"),
                          (re.sub(r"\.c\b", ".cc", re.sub(r"\bcc\b", CXX, commands)), "cc")):
        for name, text in (("fsdp", implementation),
                           ("trainer", TRAINER % {"init": init, "setup": setup, "loop": loop})):
            with open(f"{name}.{end}", "w", encoding="utf-8") as f:
                f.write(text)
        out = sh(run_them, env=CLEAN)
        check(out.count("learned") == 4 and "not" not in out, out)


def long_readme_program():
    test_readme_program(str)


@needs()
def test_one_header():
    single("fsdp.h", "fsdp_optim.h")
    sh(f"{CC} -O0 01_hello.c -o hello -pthread -lm", env=CLEAN)
    trains()


def plans(flags):
    """An extension that has parts, which are elsewhere than those of fsdp.h."""
    shutil.copy(f"{ROOT}/examples/07_plan.c", ".")
    out = sh(f"{CC} -O0 07_plan.c -o plan {flags} && ./plan", env=CLEAN)
    check("the same bits in all three" in out, out)


@needs()
def test_one_header_of_an_extension():
    single("fsdp.h", "fsdp_plan.h", "fsdp_optim.h")
    plans("-pthread -lm")


@needs()
def test_one_implementation():
    """README's table of link errors: the implementation is in one file, with every header used."""
    single("fsdp.h", "fsdp_optim.h")
    for name, text in {"core": '#define FSDP_IMPLEMENTATION\n#include "fsdp.h"\n',
                       "all": '#define FSDP_IMPLEMENTATION\n#include "fsdp_optim.h"\n',
                       "user": '#include "fsdp_optim.h"\n'
                               'int main(void) { return fsdp_adamw_defaults().beta1 != 0.9; }\n'}.items():
        with open(f"{name}.c", "w", encoding="utf-8") as f:
            f.write(text)
        sh(f"{CC} -O0 -c {name}.c", env=CLEAN)
    def link(objects):
        return f"{CC} user.o {objects} -o user -pthread -lm"
    sh(f"{link('all.o')} && ./user", env=CLEAN)
    for objects, says in (("core.o", "undefined reference to `fsdp_adamw_defaults'"),
                          ("core.o all.o", "multiple definition of `fsdp_init'")):
        out = sh(f"{link(objects)} 2>&1 && echo linked || true", env=CLEAN)
        check(says in out and "linked" not in out, out)


@needs("torchrun")
def long_before_and_after():
    """The two programs of docs/from-pytorch.md have the same losses, on one rank and on two."""
    for name, kind in (("before.py", "python"), ("after.c", "c")):
        with open(name, "w", encoding="utf-8") as f:
            f.write(blocks(kind, "docs/from-pytorch.md")[0])
    sh(f"{CC} -O1 -I{ROOT} after.c -o after -pthread -lm", env=CLEAN)
    make("tools/fsdprun")
    env = dict(CLEAN, OMP_NUM_THREADS="1")
    for ranks in (1, 2):
        outs = [sh(command, env=env) for command in (
            f"torchrun --nproc-per-node {ranks} before.py",
            f"{ROOT}/tools/fsdprun -n {ranks} ./after")]
        losses = [[float(x) for x in re.findall(r"^step .* loss (\S+)", out, re.M)] for out in outs]
        near = [abs(a - b) <= 2e-4 for a, b in zip(*losses)]
        check(len(losses[0]) == len(losses[1]) == 5 and all(near), f"{outs[0]}\n{outs[1]}")


@needs()
def long_one_header_gloo():
    need_gloo()
    single("fsdp.h", "fsdp_optim.h")
    shutil.copytree("make/single/backends", "backends")
    sh(f"{CXX} -O1 -c backends/fsdp_gloo.cc", env=CLEAN)
    sh(f"{CC} -O1 -DFSDP_BACKEND_GLOO 01_hello.c fsdp_gloo.o -o hello -lgloo -lstdc++ -pthread -lm",
       env=CLEAN)
    trains()


@needs()
def test_version():
    """The first line of fsdp.h and the newest entry of CHANGELOG.md name the version."""
    with open(f"{ROOT}/fsdp.h", encoding="utf-8") as f:
        check(f.readline().endswith(f" v{version()}\n"), "fsdp.h begins with another version")
    with open(f"{ROOT}/CHANGELOG.md", encoding="utf-8") as f:
        newest = re.search(r"^## (\S+)", f.read(), re.M).group(1)
    check(newest == version(), f"the newest entry of CHANGELOG.md is of {newest}")


@needs("git")
def test_dist():
    """What make dist packs builds without git, from its single headers and from its files; a second
    time it packs the same bytes."""
    if not os.path.exists(f"{ROOT}/.git"):
        raise Skip("no clone: what make dist packs is what git lists")
    name, packed = f"fsdp-{version()}", []
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        make("dist")
        os.umask(before)
        with open(f"make/{name}.tar.gz", "rb") as f:
            packed.append(f.read())
        shutil.rmtree("make/dist")
    check(packed[0] == packed[1], "other bytes of the same files")
    sh(f"tar -xf make/{name}.tar.gz", env=CLEAN)
    check(not [d for d, _, _ in os.walk(name) if d.endswith((".git", "build"))], "more than files")
    shutil.rmtree("make")
    with inside(name):
        sh(f"{CC} -O0 -Isingle examples/01_hello.c -o hello -MMD -pthread -lm", env=CLEAN)
        with open("hello.d", encoding="utf-8") as f:
            check("src/" not in f.read(), "not from the single headers alone")
        sh(f"./hello && {CC} -O0 -I. examples/01_hello.c -o hello -pthread -lm", env=CLEAN)
        sh("make -s CFLAGS=-O0 tools/fsdprun && tools/fsdprun -n 2 ./hello", env=CLEAN)
        for kept in ("LICENSE", "README.md", "CHANGELOG.md", "docs/gpu.md", "backends/fsdp_gloo.cc"):
            check(os.path.exists(kept), f"no {kept}")


@needs("pkg-config")
def test_make_install():
    make(f"install PREFIX={os.getcwd()}/prefix")
    os.rename("prefix", "moved")  # the installed files must find their new place
    pc = f"PKG_CONFIG_PATH={os.getcwd()}/moved/share/pkgconfig pkg-config"
    check(sh(f"{pc} --modversion fsdp", env=CLEAN).strip() == version(), "the version")
    sh(f"{CC} -O0 01_hello.c -o hello $({pc} --cflags --libs fsdp)", env=CLEAN)
    sh("moved/bin/fsdprun -n 2 ./hello", env=CLEAN)
    trains()
    plans(f"$({pc} --cflags --libs fsdp)")


@needs()
def test_uninstall():
    where = f"DESTDIR={os.getcwd()}/stage PREFIX=/usr"
    make(f"install {where}")
    check(os.path.exists("stage/usr/include/fsdp/src/base/dtype.h"), "nothing below DESTDIR")
    make(f"uninstall {where}")
    nothing_left()


@needs()
def test_uninstall_from_a_path_with_blanks():
    """What the path begins with may be somebody's folder, and so may what stands behind the blank."""
    where = f"DESTDIR='{os.getcwd()}/a b' PREFIX='/stage x'"
    for folder in ("a", "a b/stage"):
        os.makedirs(folder)
    with open("a/mine", "w", encoding="utf-8"), open("a b/stage/mine", "w", encoding="utf-8"):
        pass
    make(f"install {where}")
    check(os.path.exists("a b/stage x/include/fsdp/src/base/dtype.h"), "nothing below DESTDIR")
    check(os.access("a b/stage x/bin/fsdprun", os.X_OK), "no tools below DESTDIR")
    make(f"uninstall {where}")
    check(os.path.exists("a/mine") and os.path.exists("a b/stage/mine"), "a stranger's file is gone")
    os.rename("a b/stage x", "stage")
    nothing_left()


def nothing_left():
    left = [os.path.join(where, n) for where, _, names in os.walk("stage") for n in names]
    left += [where for where, _, _ in os.walk("stage") if "fsdp" in where.split("stage", 1)[1]]
    check(not left, f"left behind: {left}")


@needs("cmake")
def test_cmake_install():
    sh(f"cmake -S {ROOT} -B fsdp && cmake --build fsdp && cmake --install fsdp --prefix prefix",
       env=CLEAN)
    project(f"find_package(fsdp {version()} REQUIRED)", flags="-DCMAKE_PREFIX_PATH=$PWD/prefix")
    sh("prefix/bin/fsdprun -n 2 build/hello", env=CLEAN)
    trains("build/hello")
    make(f"install PREFIX={os.getcwd()}/made")  # make installs the same headers
    sh("diff -r made/include prefix/include && diff made/share/pkgconfig prefix/share/pkgconfig")


@needs("cmake")
def test_cmake_components():
    need_gloo()
    sh(f"cmake -S {ROOT} -B fsdp -DFSDP_TOOLS=OFF && cmake --install fsdp --prefix prefix",
       env=CLEAN)
    flags = "-DCMAKE_PREFIX_PATH=$PWD/prefix"
    project("find_package(fsdp REQUIRED COMPONENTS gloo)", "fsdp::gloo", "C CXX", flags)
    trains("build/hello")
    trains("build/hello", "gloo")
    for component, languages, text in (("gloo", "C", "needs C++"), ("nccl", "C", "needs nvcc"),
                                       ("mpy", "C", "no such backend")):
        try:
            project(f"find_package(fsdp REQUIRED COMPONENTS {component})", languages=languages,
                    flags=flags)
        except AssertionError as e:
            check(f"component {component}: " in str(e) and text in str(e), str(e))
        else:
            check(False, f"component {component} in {languages}: no failure")


@needs("cmake")
def long_cmake_nccl():
    """Without a GPU the program tells so; nvcc's optimizers would take most of the time."""
    try:
        found = sh(f"{ROOT}/tools/find_nccl.sh")
    except AssertionError:
        raise Skip("no CUDA or NCCL: tools/find_nccl.sh says why")
    if not re.search("^NCCL_LIBS = -lnccl$", found, re.M):
        raise Skip("NCCL is not where compilers look")
    nvcc = re.search("^NVCC = (.*)$", found, re.M).group(1)
    sh(f"cmake -S {ROOT} -B fsdp -DFSDP_TOOLS=OFF && cmake --install fsdp --prefix prefix",
       env=CLEAN)
    project("find_package(fsdp REQUIRED COMPONENTS nccl)", "fsdp::nccl", "C CXX CUDA",
            f"-DCMAKE_PREFIX_PATH=$PWD/prefix -DCMAKE_CUDA_COMPILER={nvcc} "
            "-DCMAKE_CUDA_ARCHITECTURES=90 -DCMAKE_CUDA_FLAGS='-Xcicc -O0 -Xptxas -O0'")
    out = sh("build/hello 2>&1 || true", env=CLEAN)
    check("CUDA" in out or "loss" in out, out)


@needs("cmake")
def long_cmake_subdirectory():
    os.symlink(ROOT, "fsdp")
    project("add_subdirectory(fsdp fsdp-build)")
    trains("build/hello")


@needs("cmake")
def long_cmake_fetch_content():
    need_gloo()
    project("include(FetchContent)\nset(FSDP_GLOO ON)\n"
            f"FetchContent_Declare(fsdp SOURCE_DIR {ROOT})\nFetchContent_MakeAvailable(fsdp)",
            "fsdp::gloo", "C CXX")
    trains("build/hello", "gloo")
    check(not os.path.exists("build/_deps/fsdp-build/fsdprun"), "tools are built for the top only")


if __name__ == "__main__":
    run("package", globals())
