#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_package.py - the library as other projects get it: one header, make install and pkg-config,
cmake --install and find_package, add_subdirectory, FetchContent. Each test builds a program outside
of this tree, in a directory of its own, and runs it on one rank and on several: also the release
that make dist packs. What many tests need is made once (`once`), the library by make lib in
FSDP_BUILD, and nothing is optimized, except at night: long_*, and the commands of README.md as they
stand there. The same text is compiled once (cc_once.py). The gates `package` of tools/check.sh are in
packages.py."""
import atexit
import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile

from harness import Skip, check, run, sh
from test_library import check_exports

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.path.join(ROOT, os.environ.get("FSDP_BUILD") or "build")
CC = os.environ.get("CC") or "cc"
CXX = os.environ.get("CXX") or "c++"
# The test's programs must not find this tree, nor get variables of this make.
MINE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "DESTDIR", "CPATH", "C_INCLUDE_PATH")
CLEAN = {k: v for k, v in os.environ.items() if k not in MINE}
PROJECT = """cmake_minimum_required(VERSION 3.17)
project(user LANGUAGES %(languages)s)
%(get)s
foreach(target IN ITEMS %(targets)s)
    string(REPLACE "fsdp::" "on_" name ${target})
    if(name MATCHES "on_lib|on_shared")
        add_executable(${name} user.c)
    else()
        add_executable(${name} 01_hello.c)
    endif()
    target_link_libraries(${name} PRIVATE ${target})
endforeach()
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
                copy(f"{ROOT}/examples", "01_hello.c")
                with open("01_hello.c", encoding="utf-8") as hello, \
                        open("user.c", "w", encoding="utf-8") as user:  # of the compiled library
                    user.write(hello.read().replace("#define FSDP_IMPLEMENTATION\n", ""))
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


def once(made):
    """A function that makes something in a folder that all tests share, and returns its path. The
    folder goes with the process."""
    @functools.lru_cache()
    def wrapped():
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        with inside(folder):
            made()
        return folder
    return wrapped


@once
def compilers():
    """CC and CXX, and what other programs take for them."""
    for name in {"cc", "c++", CC, CXX}:
        real = shutil.which(name)
        if real and "/" not in name:
            with open(name, "w", encoding="utf-8") as f:
                f.write(f"""#!/bin/sh
for word; do case $word in *.c | *.cc)
    ! grep -q fsdp "$word" || exec {sys.executable} -IS {ROOT}/tests/tools/cc_once.py {os.getcwd()} {real} "$@" ;;
esac; done
exec {real} "$@"
""")
            os.chmod(name, 0o755)


def make(target, build=BUILD):
    sh(f"make -s DEPS=no -C {ROOT} {target} BUILD={build}", env=CLEAN)


@once
def single():
    """Each header as one file."""
    make("single", os.getcwd())


@once
def made():
    """What make installs; it was moved, so that installed files must find their new place."""
    make(f"install PREFIX={os.getcwd()}/first")
    os.rename("first", "prefix")


@once
def cmade():
    """What CMake installs, and its build directory."""
    sh(f"cmake -S {ROOT} -B build -DCMAKE_BUILD_TYPE=Debug -DFSDP_TOOLS=OFF"
       " -DCMAKE_INSTALL_LIBDIR=lib && cmake --build build -- -j2 && cmake --install build --prefix prefix",
       env=CLEAN)


def copy(folder, *names):
    for name in names:
        shutil.copy(f"{folder}/{name}", ".")


def pkg_config(prefix, lib="lib"):
    return (f"PKG_CONFIG_PATH={prefix}/share/pkgconfig:{prefix}/{lib}/pkgconfig "
            "pkg-config --cflags --libs")


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


def project(get, targets="fsdp::fsdp", languages="C", flags="", again=False):
    """Builds the example as a CMake project, for each target of the library a program on_NAME; again:
    with what CMake has found out about the compilers."""
    with open("CMakeLists.txt", "w", encoding="utf-8") as f:
        f.write(PROJECT % {"get": get, "targets": targets, "languages": languages})
    if not again:
        shutil.rmtree("build", ignore_errors=True)
    out = sh(f"cmake -S . -B build {flags}", env=CLEAN)
    check("CMake Warning" not in out, out)
    sh("cmake --build build -- -j2", env=CLEAN)
    for target in targets.split():
        with open(f"build/CMakeFiles/on_{target[6:]}.dir/link.txt", encoding="utf-8") as f:
            check(f.read().count("pthread") <= 1, f"{target}: -pthread more than once")


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
    in_cc = re.sub(r"\.c\b", ".cc", re.sub(r"\bcc\b", CXX, commands))
    if edit is fast:  # the implementation as it is: C and C++ may be mixed
        in_cc = re.sub(r"^.* -c fsdp.cc .*\n", "", in_cc, flags=re.M)
    for run_them, end in ((commands, "c"), (in_cc, "cc")):
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
    copy(f"{single()}/single", "fsdp.h", "fsdp_optim.h")
    sh(f"{CC} -O0 01_hello.c -o hello -pthread -lm", env=CLEAN)
    trains()


@needs()
def test_one_header_of_an_extension():
    """An extension that has parts, which are elsewhere than those of fsdp.h."""
    copy(f"{single()}/single", "fsdp.h", "fsdp_plan.h", "fsdp_optim.h")
    copy(f"{ROOT}/examples", "07_plan.c")
    out = sh(f"{CC} -O0 07_plan.c -o plan -pthread -lm && ./plan", env=CLEAN)
    check("the same bits in all three" in out, out)


@needs()
def test_one_implementation():
    """The link errors of docs/build.md: the implementation is in one file, with every header used."""
    make("lib")
    with open("plan.c", "w", encoding="utf-8") as f:
        f.write('#include "fsdp_plan.h"\nconst char *why(fsdp_plan *p) { return fsdp_plan_why(p); }\n')
    with open("main.c", "w", encoding="utf-8") as f:
        f.write('#include <stddef.h>\nconst char *why(void *);\nint main(void) { return why(NULL) == NULL; }\n')
    for name in ("01_hello", "plan", "main"):  # the example implements fsdp.h and fsdp_optim.h
        sh(f"{CC} -O0 -I{ROOT} -c {name}.c -o {name}.o", env=CLEAN)

    def link(objects):
        return f"{CC} plan.o {objects} -o user -pthread -lm"
    sh(f"{link(f'main.o {BUILD}/libfsdp.o')} && ./user", env=CLEAN)
    for objects, says in (("01_hello.o", "undefined reference to `fsdp_plan_why'"),
                          (f"01_hello.o {BUILD}/libfsdp.o", "multiple definition of `fsdp_init'")):
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
    copy(f"{single()}/single", "fsdp.h", "fsdp_optim.h")
    shutil.copytree(f"{single()}/single/backends", "backends")
    sh(f"{CXX} -O1 -c backends/fsdp_gloo.cc", env=CLEAN)
    sh(f"{CC} -O1 -DFSDP_BACKEND_GLOO 01_hello.c fsdp_gloo.o -o hello -lgloo -lstdc++ -pthread -lm",
       env=CLEAN)
    trains()


@needs()
def test_version():
    """Every file that names the version names that of fsdp.h."""
    for name, pattern in {
            "fsdp.h": r"\A.* v(\S+)\n", "CHANGELOG.md": r"^## (\S+)",
            "CITATION.cff": r"^version: (\S+)", "meson.build": r"^project.* version: '([^']+)'",
            "packaging/vcpkg/vcpkg.json": r'"version": "([^"]+)"',
            "packaging/conan/config.yml": r'"([\d.]+)":', "packaging/conan/all/conandata.yml": r'"([\d.]+)":',
            "packaging/spack/package.py": r'version\("([^"]+)"'}.items():
        with open(f"{ROOT}/{name}", encoding="utf-8") as f:
            found = re.search(pattern, f.read(), re.M)
        check(found and found.group(1) == version(), f"{name}: {found and found.group(1)}")


@needs("git")
def test_dist():
    """What make dist packs builds without git, from its single headers and from its files. Two clones
    in other directories, with other permissions and times, give the same bytes."""
    if not os.path.exists(f"{ROOT}/.git"):
        raise Skip("no clone: what make dist packs is what git lists")
    name, packed = f"fsdp-{version()}", []
    for folder, umask, day in (("a", 0o022, "2026-01-02"), ("b/other", 0o077, "2001-02-03")):
        before = os.umask(umask)
        sh(f"git clone -q {ROOT} {folder}", env=CLEAN)
        sh(f"git -C {ROOT} ls-files -z | (cd {ROOT} && xargs -0 cp --parents -t {os.getcwd()}/{folder})",
           env=CLEAN)  # with what is not committed yet
        sh(f"find {folder} -name .git -prune -o -exec touch -d {day} {{}} +")
        sh(f"make -s -C {folder} dist", env=CLEAN)
        os.umask(before)
        with open(f"{folder}/build/{name}.tar.gz", "rb") as f:
            packed.append(f.read())
    check(packed[0] == packed[1], "other bytes of the same files")
    sh(f"tar -xf a/build/{name}.tar.gz", env=CLEAN)
    check(not [d for d, _, _ in os.walk(name) if d.endswith((".git", "build"))], "more than files")
    with inside(name):
        sh(f"{CC} -O0 -Isingle examples/01_hello.c -o hello -MMD -MF hello.d -pthread -lm", env=CLEAN)
        with open("hello.d", encoding="utf-8") as f:
            check("src/" not in f.read(), "not from the single headers alone")
        sh("make -s STD=-std=gnu99 CFLAGS=-O0 tools/fsdprun && ./hello && tools/fsdprun -n 2 ./hello", env=CLEAN)
        for kept in ("LICENSE", "README.md", "CHANGELOG.md", "docs/gpu.md", "backends/fsdp_gloo.cc",
                     "CMakeLists.txt", "meson.build", "CITATION.cff", "SECURITY.md"):
            check(os.path.exists(kept), f"no {kept}")


def documents(folder):
    """The licence and the documents are there, and what README.md refers to, except for code."""
    with open(f"{folder}/README.md", encoding="utf-8") as f:
        links = set(re.findall(r"\]\(([^)#:]+)", f.read()))
    check("docs/build.md" in links, "no links")
    for name in links - {"fsdp.h", "fsdp.hpp", "CONTRIBUTING.md", "backends/README.md"} | {"LICENSE", "SECURITY.md"}:
        check(os.path.exists(f"{folder}/{name}"), f"{name} is not installed")


@needs("pkg-config")
def test_make_install():
    prefix = f"{made()}/prefix"
    check(sh(pkg_config(prefix).replace("--cflags --libs", "--modversion fsdp"), env=CLEAN).strip()
          == version(), "the version")
    flags = sh(f"{pkg_config(prefix)} fsdp", env=CLEAN)
    check(flags.count("-pthread") == 1, flags)
    sh(f"{CC} -O0 01_hello.c -o hello {flags.strip()}", env=CLEAN)
    sh(f"{prefix}/bin/fsdprun -n 2 ./hello", env=CLEAN)
    trains()
    documents(f"{prefix}/share/doc/fsdp")
    headers = sorted(os.listdir(f"{prefix}/include/fsdp"))
    check({"fsdp.hpp", "fsdp_torch.h"} < set(headers), headers)
    everything = "".join(f"#include <{name}>\n" for name in headers if name.endswith(".h") and name != "fsdp_torch.h")
    check(everything.count("\n") == 10, everything)
    sh(f"{CC} -std=c99 {flags.strip()} -DFSDP_IMPLEMENTATION -fsyntax-only -x c - <<'E'\n{everything}E",
       env=CLEAN)


@needs("pkg-config")
def test_make_lib():
    """The compiled library, shared and static, for users without the implementation."""
    prefix = f"{made()}/prefix"
    flags = sh(f"{pkg_config(prefix)} --static fsdp-lib", env=CLEAN).strip()
    for name, link in (("shared", f"{flags} -Wl,-rpath,{prefix}/lib"),
                       ("static", flags.replace("-lfsdp", "-l:libfsdp.a"))):
        sh(f"{CC} -O0 user.c -o {name} {link}", env=CLEAN)
        trains(f"./{name}")
        with open("in_cxx.cc", "w", encoding="utf-8") as f:
            f.write("#include <fsdp.hpp>\n"
                    "int main() { fsdp::world w; fsdp::model m(w); return w.close(); }\n")
        sh(f"{CXX} -std=c++17 -O0 in_cxx.cc -o in_cxx {link} && ./in_cxx", env=CLEAN)
    abi = version().rsplit(".", 1)[0]
    check(f"libfsdp.so.{abi} => {os.path.realpath(prefix)}/lib/" in sh("ldd shared"), sh("ldd shared"))
    check("libfsdp" not in sh("ldd static"), "not static")


@needs("pkg-config")
def test_make_gloo():
    """fsdp-gloo.pc, and LIBDIR below PREFIX."""
    need_gloo()
    here = os.getcwd()
    make(f"install GLOO=yes PREFIX={here}/prefix LIBDIR=lib/arch", f"{BUILD}/gloo")
    sh(f"{CC} -O0 01_hello.c -o hello $({pkg_config(f'{here}/prefix', 'lib/arch')} fsdp-gloo)", env=CLEAN)
    trains()
    trains(backend="gloo")
    flags = sh(f"{pkg_config(f'{here}/prefix', 'lib/arch')} fsdp-lib", env=CLEAN)
    sh(f"{CC} -O0 user.c -o user {flags.strip()} -Wl,-rpath,{here}/prefix/lib/arch -lm", env=CLEAN)
    trains("./user", "gloo")
    check("gloo" in check_exports("prefix/lib/arch/libfsdp.so"), "no Gloo in libfsdp.so")


@needs()
def test_make_stub():
    """libfsdp.so with the backend for GPUs, on stand-ins for CUDA and NCCL."""
    make("lib NCCL=stub", f"{BUILD}/stub")
    check("nccl" in check_exports(f"{BUILD}/stub/libfsdp.so"), "no NCCL in libfsdp.so")


@needs()
def test_uninstall():
    where = f"DESTDIR={os.getcwd()}/stage PREFIX=/usr LIBDIR=lib64"
    make(f"install {where}")
    for name in ("include/fsdp/src/base/dtype.h", "lib64/libfsdp.so", "lib64/pkgconfig/fsdp-lib.pc",
                 "share/doc/fsdp/LICENSE", "share/doc/fsdp/docs/build.md", "bin/fsdprun"):
        check(os.path.exists(f"stage/usr/{name}"), f"no {name} below DESTDIR")
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
    check(os.path.exists("a/mine") and os.path.exists("a b/stage/mine"), "the file of another program is gone")
    os.rename("a b/stage x", "stage")
    nothing_left()


def nothing_left():
    left = [os.path.join(where, n) for where, _, names in os.walk("stage") for n in names]
    left += [where for where, _, _ in os.walk("stage") if "fsdp" in where.split("stage", 1)[1]]
    check(not left, f"left behind: {left}")


@needs("cmake")
def test_cmake_install():
    prefix = f"{cmade()}/prefix"
    project(f"find_package(fsdp {version()} REQUIRED)", "fsdp::fsdp fsdp::lib fsdp::shared",
            flags=f"-DCMAKE_PREFIX_PATH={prefix}")
    sh(f"{prefix}/bin/fsdprun -n 2 build/on_fsdp", env=CLEAN)
    for program in ("fsdp", "lib", "shared"):
        trains(f"build/on_{program}")
    check("libfsdp.so" in sh("ldd build/on_shared") and "libfsdp.so" not in sh("ldd build/on_lib"), "linkage")
    nm = "nm -D --defined-only {}/libfsdp.so | awk '{{print $3}}'"
    check(sh(nm.format(f"{prefix}/lib")) == sh(nm.format(f"{made()}/prefix/lib")), "other exports")
    for same in ("include", "share/doc", "share/pkgconfig", "lib/pkgconfig"):  # as of make
        sh(f"diff -r {made()}/prefix/{same} {prefix}/{same}")


@needs("cmake", "pkg-config")
def test_cmake_install_elsewhere():
    """CMAKE_INSTALL_INCLUDEDIR, CMAKE_INSTALL_LIBDIR and CMAKE_INSTALL_DOCDIR say where."""
    here = os.getcwd()
    sh(f"cmake -S {ROOT} -B build -DCMAKE_BUILD_TYPE=Debug -DFSDP_TOOLS=OFF -DFSDP_LIB=OFF"
       " -DCMAKE_INSTALL_LIBDIR=lib/arch -DCMAKE_INSTALL_INCLUDEDIR=inc -DCMAKE_INSTALL_DOCDIR=doc"
       " && cmake --build build && cmake --install build --prefix /opt",
       env=dict(CLEAN, DESTDIR=f"{here}/stage"))
    documents("stage/opt/doc")
    flags = sh(f"{pkg_config(f'{here}/stage/opt', 'lib/arch')} fsdp", env=CLEAN)
    make("lib")
    sh(f"{CC} -O0 user.c {BUILD}/libfsdp.o -o hello {flags.strip()}", env=CLEAN)
    with open("CMakeLists.txt", "w", encoding="utf-8") as f:
        f.write("cmake_minimum_required(VERSION 3.17)\nproject(user LANGUAGES C)\n"
                "find_package(fsdp REQUIRED)\nif(TARGET fsdp::lib)\nmessage(FATAL_ERROR lib)\nendif()\n"
                "get_target_property(where fsdp::fsdp INTERFACE_INCLUDE_DIRECTORIES)\n"
                "if(NOT EXISTS ${where}/fsdp.h)\nmessage(FATAL_ERROR ${where})\nendif()\n")
    sh(f"cmake -S . -B user -Dfsdp_DIR={here}/stage/opt/lib/arch/cmake/fsdp", env=CLEAN)
    for name in ("include", "lib/cmake", "share/doc"):
        check(not os.path.exists(f"stage/opt/{name}"), f"{name} in spite of the options")


@needs("cmake")
def test_cmake_components():
    need_gloo()
    flags = f"-DCMAKE_PREFIX_PATH={cmade()}/prefix"
    for component, languages, text in (("gloo", "C", "needs C++"), ("nccl", "C", "needs nvcc"),
                                       ("mpy", "C", "no such backend")):
        try:
            project(f"find_package(fsdp REQUIRED COMPONENTS {component})", languages=languages,
                    flags=flags, again=os.path.exists("build"))
        except AssertionError as e:
            check(f"component {component}: " in str(e) and text in str(e), str(e))
        else:
            check(False, f"component {component} in {languages}: no failure")
    project("find_package(fsdp REQUIRED COMPONENTS gloo)", "fsdp::gloo", "C CXX", flags)
    trains("build/on_gloo")
    trains("build/on_gloo", "gloo")


@needs("cmake")
def long_cmake_nccl():
    """Without a GPU the program tells so; nvcc's optimizers would take most of the time. The project
    says for which GPUs; if it says nothing, the library does, without a warning (CMP0104)."""
    try:
        found = sh(f"{ROOT}/tools/find_nccl.sh")
    except AssertionError:
        raise Skip("no CUDA or NCCL: tools/find_nccl.sh says why")
    if not re.search("^NCCL_LIBS = -lnccl$", found, re.M):
        raise Skip("NCCL is not where compilers look")
    nvcc = re.search("^NVCC = (.*)$", found, re.M).group(1)
    flags = (f"-DCMAKE_PREFIX_PATH={cmade()}/prefix -DCMAKE_CUDA_COMPILER={nvcc} "
             "-DCMAKE_CUDA_FLAGS='-Xcicc -O0 -Xptxas -O0' ")
    for more, archs in (("-DCMAKE_CUDA_ARCHITECTURES=90", {"90"}), ("", {"80"})):
        project("find_package(fsdp REQUIRED COMPONENTS nccl)", "fsdp::nccl", "C CXX CUDA", flags + more)
        out = sh("build/on_nccl 2>&1 || true", env=CLEAN)
        check("CUDA" in out or "loss" in out, out)
        with open("build/CMakeFiles/fsdp_nccl.dir/flags.make", encoding="utf-8") as f:
            compiled_for = set(re.findall(r"\bsm_(\d+)", f.read()))
        check(compiled_for == archs, f"{more}: for {compiled_for}")


@needs("cmake")
def long_cmake_subdirectory():
    os.symlink(ROOT, "fsdp")
    project("add_subdirectory(fsdp fsdp-build)", "fsdp::fsdp fsdp::lib")
    trains("build/on_fsdp")
    trains("build/on_lib")


@needs("cmake")
def long_cmake_fetch_content():
    """fsdprun comes with it, and a test may start it by its target; other tools by FSDP_TOOLS."""
    need_gloo()
    get = ("include(FetchContent)\nset(FSDP_GLOO ON)\n"
           f"FetchContent_Declare(fsdp SOURCE_DIR {ROOT})\nFetchContent_MakeAvailable(fsdp)\n"
           "enable_testing()\nadd_test(NAME two COMMAND fsdp::fsdprun -n 2 $<TARGET_FILE:on_gloo>)")
    project(get, "fsdp::gloo", "C CXX")
    trains("build/on_gloo", "gloo")
    sh("cd build && ctest", env=CLEAN)
    check(not os.path.exists("build/_deps/fsdp-build/fsdpck"), "tools that nobody asked for")
    sh("cmake -B build -DFSDP_TOOLS=ON && cmake --build build && test -x build/_deps/fsdp-build/fsdpck",
       env=CLEAN)


@needs("cmake", "pkg-config")
def long_cmake_gloo():
    """Libraries with Gloo: what is installed brings the backend along. BUILD_SHARED_LIBS chooses one."""
    need_gloo()
    build = (f"cmake -S {ROOT} -B fsdp -DFSDP_GLOO=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_INSTALL_LIBDIR=lib"
             " {} && cmake --build fsdp -- -j2 && cmake --install fsdp --prefix {}")
    sh(build.format("", "prefix"), env=CLEAN)
    project("find_package(fsdp REQUIRED COMPONENTS gloo)", "fsdp::lib fsdp::shared fsdp::gloo", "C CXX",
            "-DCMAKE_PREFIX_PATH=$PWD/prefix")
    for program in ("build/on_lib", "build/on_shared", "build/on_gloo"):
        trains(program, "gloo")
    sh(f"{CC} -O0 01_hello.c -o hello $({pkg_config(f'{os.getcwd()}/prefix')} fsdp-gloo)", env=CLEAN)
    trains(backend="gloo")
    for shared, kept, gone in (("ON", "libfsdp.so", "libfsdp.a"), ("OFF", "libfsdp.a", "libfsdp.so")):
        sh(build.format(f"-DBUILD_SHARED_LIBS={shared}", shared), env=CLEAN)
        check(os.path.exists(f"{shared}/lib/{kept}"), f"BUILD_SHARED_LIBS={shared}: no {kept}")
        check(not os.path.exists(f"{shared}/lib/{gone}"), f"BUILD_SHARED_LIBS={shared}: {gone}")


if __name__ == "__main__":
    CLEAN["PATH"] = f"{compilers()}:{CLEAN['PATH']}"
    run("package", globals())
