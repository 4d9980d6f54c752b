#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_tools.py - the tools that read sources, on small made-up trees: amalgamate.py writes one
header that does what the many did, each check of check_text.py, errors and floors finds what it is
there for, and run_tests.sh hands it what ran. And where with_torchrun.sh looks."""
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time

from harness import Skip, check, python, run, sh

TOOLS = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "tools"))
SPDX = "SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */\n"
LICENCE = "Free for all.\n"


def part(title, code="", more="", uses="", up="../../"):
    """A part of src/core/; with another `up` a file of backends/."""
    guard = re.search(r"\w+(?=\.h)", title).group().upper()
    by = "A part of fsdp.h. Callers: programs." if up == "../../" else ""
    return (f"/* {title}\n\n   {by}{more}\n\n   {SPDX}".replace("   \n\n", "") +
            f'#ifndef FSDP_H\n#include "{up}fsdp.h"\n#endif\n'
            f"#ifndef FSDPI_{guard}_H\n#define FSDPI_{guard}_H\n{uses}\n{code}#endif\n")


BACKENDS = ("#ifndef FSDP_BACKEND_NET\n#define FSDP_BACKEND_SHM 1\n#endif\n"
            "#ifdef FSDP_BACKEND_SHM\n#include \"../../backends/fsdp_shm.h\"\n#endif\n"
            "#ifdef FSDP_BACKEND_NET\n#include \"../../backends/fsdp_net.h\"\n#endif\n")
GOOD = {
    "LICENSE": LICENCE,
    "fsdp.h": "/* fsdp.h - a library\n\n   SPDX-License-Identifier: MIT (full text at the end of "
              "this file)\n\nA PROGRAM\n    none\n\nWORDS\n    none\n*/\n"
              "#ifndef FSDP_H\n#define FSDP_H\n"
              "int fsdp_all(void);\n#endif\n#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_DONE)\n"
              f"#define FSDP_DONE\n#include \"src/core/b.h\"\n#endif\n\n/*\n{LICENCE}*/\n",
    "src/core/a.h": part("src/core/a.h - the first\n   of two", "static int fsdpi_a(void) { return 1; }\n"),
    "src/core/backends.h": part("src/core/backends.h - the table", BACKENDS, uses='#include "a.h"\n'),
    "src/core/b.h": part("src/core/b.h - the second", "static int fsdpi_b(void) { return 20; }\n"
                     "FSDP_API int fsdp_all(void) { return fsdpi_a() + fsdpi_b() + fsdpi_move(); }\n",
                     " See backends/README.md.",
                     '#include "a.h" // a\n#include "backends.h"\n#ifndef FSDP_API\n'
                     "#define FSDP_API\n#endif\n"),
    "backends/fsdp_base.h": part("fsdp_base.h - what backends share: much",
                                 "static int fsdpi_base(void) { return 299 + fsdpi_a(); }\n",
                                 uses='#include "../src/core/a.h"\n', up="../"),
    "backends/fsdp_shm.h": part("fsdp_shm.h - the default\n\n   How it works.",
                                "static int fsdpi_move(void) { return fsdpi_base(); }\n",
                                uses='#include "fsdp_base.h"\n', up="../"),
    "backends/fsdp_net.h": part("fsdp_net.h - the other",
                                "static int fsdpi_move(void) { return 4000 + fsdpi_base(); }\n",
                                uses='#include "fsdp_base.h"\n', up="../"),
    "backends/fsdp_net.cu": f"/* fsdp_net.cu - compiled alone\n\n   {SPDX}#include \"../src/core/a.h\"\n"
                            "int main(void) { return fsdpi_a() - 1; }\n",
    "fsdp_more.h": f"/* fsdp_more.h - an extension\n\n   {SPDX}#include \"fsdp.h\"\n"
                   "static int fsdpi_more_own(void) { return fsdp_all(); } // not fsdpi_a\n",
    "examples/use.c": '/* SPDX-License-Identifier: MIT */\n#include "fsdp.h"\n',
    "tests/core/test_all.c": "/* test_all.c\n\n   SPDX-License-Identifier: MIT */\n"
                        "TEST(all, works) {}\nTEST_P(all, of_a_table, rows) {}\n",
    "tests/core/test_fully_shard_a.c": "/* SPDX-License-Identifier: MIT */\n"
                                  "/* PyTorch: test_fully_shard_a.py test_done, test_more. Done:\n"
                                  "   all of it. */\n"
                                  "TEST(fully_shard_a, done) {}\n"
                                  "TEST(long_fully_shard_a, large, NIGHT | SECONDS(9)) {}\n",
    "tests/core/test_golden_events.c": "/* SPDX-License-Identifier: MIT */\nenum { RULE_SUM };\n",
    "README.md": "| what | how |\n|---|---|\n| all of it | nothing |\n",
    "docs/architecture.md": "src/core/a.h   the first one\nsrc/core/backends.h   the table\n"
                            "src/core/b.h   the other one\n`fsdp_all`\n```\nfsdpi_a     by nothing\n```\nONE by one\n",
    "CONTRIBUTING.md": "| what works | tests |\n|---|---|\n| all | `test_all` |\n"
                     "| a table | `all.of_*`, `fully_shard_a.done` |\n",
    "docs/parity.md": "`all.works` does.\n\n- `test_fully_shard_a.py`: `test_absent`.\n"
                      "- SUM: one.\n",
}


@contextlib.contextmanager
def tree(also=(), **changes):
    """The good tree with other files, in a directory of its own: names have _ for / and for dots.
    `also` are further files, by name."""
    files = dict(GOOD, **dict(also))
    for name in GOOD:
        key = name.replace("/", "_").replace(".", "_")
        files[name] = changes.pop(key, files[name])
    check(not changes, f"no such files: {list(changes)}")
    with tempfile.TemporaryDirectory() as root:
        for name, text in files.items():
            os.makedirs(os.path.join(root, os.path.dirname(name)), exist_ok=True)
            with open(os.path.join(root, name), "w", encoding="utf-8") as f:
                f.write(text)
        yield root


PASSES = set()  # names of checks that have passed the good tree


def passes(name, root):
    r = python(f"{TOOLS}/check_text.py", name, cwd=root)
    check(r.returncode == 0, f"{name}: {r.stdout}")


def finds(name, wanted, *others, **changes):
    """The check passes the good tree, and complains about a changed one in these words."""
    for changed in [{}] * (name not in PASSES) + [changes]:
        with tree(**changed) as root:
            r = python(f"{TOOLS}/check_text.py", name, cwd=root)
        check((r.returncode == 0) == (not changed), f"{name} {list(changed)}: {r.stdout}")
        for words in (wanted, *others) if changed else ():
            check(words in r.stdout, f"{name}: {r.stdout}instead of: {words}")
    PASSES.add(name)


def amalgamate(root, name="fsdp.h"):
    r = python(f"{TOOLS}/amalgamate.py", "single", root, cwd=root)
    check(r.returncode == 0, r.stdout)
    with open(os.path.join(root, "single", name), encoding="utf-8") as f:
        return f.read()


def result(folder, flags=""):
    """What fsdp_all() returns with this folder's fsdp.h, included before and with its code."""
    program = os.path.join(folder, "program.c")
    with open(program, "w", encoding="utf-8") as f:
        f.write('#include "fsdp.h"\n#define FSDP_IMPLEMENTATION\n#include "fsdp.h"\n'
                "#include <stdio.h>\nint main(void) { return printf(\"%d\", fsdp_all()) < 0; }\n")
    sh(f"cc {flags} -o program program.c", cwd=folder)
    return int(sh("./program", cwd=folder))


def test_amalgamate_works():
    with tree() as root:
        check(result(root) == 321 and result(root, "-DFSDP_BACKEND_NET") == 4321, "the tree itself")
        amalgamate(root)
        single = os.path.join(root, "single")
        check(sorted(os.listdir(single)) == ["backends", "fsdp.h", "fsdp_more.h"], "the headers")
        check(result(single) == 321, "the one header")
        check(result(single, "-DFSDP_BACKEND_NET") == 4321, "another backend beside it")
        sh("cc -x c -o net backends/fsdp_net.cu && ./net", cwd=single)


def test_amalgamate_text():
    with tree() as root:
        text = amalgamate(root)
        parts = ["src/core/a.h", "src/core/backends.h", "backends/fsdp_base.h", "backends/fsdp_shm.h",
                 "src/core/b.h"]  # parts in a condition stay inside it
        places = [text.index(f"/* ==== {name} ====") for name in parts]
        check(places == sorted(places), "each part below those that it uses")
        listed = [line.split()[0] for line in text.split("WORDS")[0].split("\n")
                  if line.startswith(("    src/core/", "    backends/"))]
        check(listed == parts, f"table of contents: {listed}")
        check("    src/core/a.h             the first of two\n" in text and
              "what backends share\n" in text, "their titles")
        for once in ("SPDX-", LICENCE, "static int fsdpi_base", "What it is", "How it works."):
            expected = 0 if once == "What it is" else 1
            check(text.count(once) == expected, f"{once!r}: {text.count(once)} times")
        check("A part of" not in text and "See backends/README.md." in text, "the first comments")
        check(text.endswith(f"/*\n{LICENCE}*/\n"), "the licence at its end")
        check(amalgamate(root) == text, "the same text again")


def test_amalgamate_extension():
    """Extensions are files beside the one header: without parts as they are, else with them. Parts
    of the core are in the one header already."""
    with tree() as root:
        check(amalgamate(root, "fsdp_more.h") == GOOD["fsdp_more.h"], "an extension without parts")
    more = GOOD["fsdp_more.h"] + '#include "src/core/b.h"\n#include "backends/fsdp_base.h"\n'
    with tree(fsdp_more_h=more) as root:
        text = amalgamate(root, "fsdp_more.h")
        check(text.startswith("// Written by tools/amalgamate.py from fsdp_more.h, backends/"), text)
        check("\n#include \"fsdp.h\"\n" in text and "#include \"core" not in text, "its includes")
        check(text.count("static int fsdpi_base(") == 1, text)
        check("static int fsdpi_b(" not in text, "the core's are in fsdp.h")


def test_amalgamate_changes():
    """A part that is new, and one that is gone."""
    include = GOOD["fsdp.h"].replace("#include \"src/core/b.h\"\n", "#include \"src/core/c.h\"\n")
    with tree(fsdp_h=include) as root:
        r = python(f"{TOOLS}/amalgamate.py", "single", root, cwd=root)
        check(r.returncode == 1 and "cannot find src/core/c.h" in r.stdout, str(r))
        os.rename(os.path.join(root, "src/core/b.h"), os.path.join(root, "src/core/c.h"))
        text = amalgamate(root)
        check("== src/core/c.h ==" in text and "    src/core/c.h             the second\n" in text, text)


def test_licence():
    finds("licence", "fsdp.h: its last comment", LICENSE="Free for some.\n")
    finds("licence", "fsdp.h: its last comment", fsdp_h=GOOD["fsdp.h"] + "int x;\n")
    finds("licence", "tests/core/test_all.c: no line SPDX", tests_core_test_all_c="/* test_all.c */\n")
    finds("licence", "src/core/a.h: the full text of the licence is not at the end of this file",
          src_core_a_h=GOOD["src/core/a.h"].replace("end of fsdp.h", "end of this file"))


def test_layers():
    def also(name, code):
        return GOOD[name].replace("#endif\n", f"#endif\n{code}\n", 1)
    finds("layers", "src/core/a.h: names a backend: fsdpi_shm_open",
          src_core_a_h=also("src/core/a.h", "int x = fsdpi_shm_open();"))
    finds("layers", "src/core/a.h: names a backend: fsdp_net_comm_ops",
          src_core_a_h=also("src/core/a.h", "/* why */ int x = fsdp_net_comm_ops();"))
    finds("layers", "src/core/a.h: names a backend: FSDP_BACKEND_SHM",
          src_core_a_h=also("src/core/a.h", "#ifdef FSDP_BACKEND_SHM\n#endif"))
    finds("layers", "src/core/a.h: includes backends/fsdp_base.h, which is above it",
          src_core_a_h=also("src/core/a.h", '#include "../../backends/fsdp_base.h"'))
    finds("layers", "src/core/a.h -> src/core/b.h -> src/core/a.h: a circle of includes",
          src_core_a_h=also("src/core/a.h", '#include "b.h"'))
    finds("layers", "src/core/a.h: calls fsdp_all of src/core/b.h, which stands on it",
          src_core_a_h=also("src/core/a.h", "static int fsdpi_x(void) { return fsdp_all(); }"))
    finds("layers", "src/core/b.h: does not begin with #ifndef FSDP_H",
          src_core_b_h=GOOD["src/core/b.h"].replace("#ifndef FSDP_H", "#ifdef FSDP_H"))
    finds("layers", "src/core/b.h: uses fsdpi_a, and does not include src/core/a.h itself",
          src_core_b_h=GOOD["src/core/b.h"].replace('#include "a.h" // a\n', ""))
    finds("layers", "src/core/b.h: uses FSDPI_N_OF_A, and does not include src/core/a.h itself",
          src_core_a_h=also("src/core/a.h", "#define FSDPI_X(name) FSDPI_N_##name"),
          src_core_backends_h=also("src/core/backends.h", "int x = FSDPI_N_OF_A;"),
          src_core_b_h=also("src/core/b.h", "int y = FSDPI_N_OF_A;").replace('#include "a.h" // a\n', ""))
    finds("layers", "src/core/a.h: asks for FSDP_IMPLEMENTATION: fsdp.h does so",
          src_core_a_h=also("src/core/a.h", "#ifdef FSDP_IMPLEMENTATION\n#endif"))
    finds("layers", "src/core/b.h: nothing includes it",
          fsdp_h=GOOD["fsdp.h"].replace('#include "src/core/b.h"', ""))
    for include in ('"core/b.h"', "<core/b.h>", "<b.h>"):
        finds("layers", "src/core/a.h -> src/core/b.h -> src/core/a.h: a circle of includes",
              src_core_a_h=also("src/core/a.h", f"# include {include}"))
    finds("layers", "src/core/a.h: includes backends/fsdp_base.h, which is above it",
          src_core_a_h=also("src/core/a.h", "#include <backends/fsdp_base.h>"))
    finds("layers", "src/core/a.h: #include FILE: only #include with the name of a file",
          src_core_a_h=also("src/core/a.h", '#define FILE "b.h"\n#include FILE'))
    finds("layers", "src/core/a.h: #include_next b.h: only #include with the name of a file",
          src_core_a_h=also("src/core/a.h", "#include_next <b.h>"))
    finds("layers", "fsdp.h: includes more/b.inc, which no check reads",
          fsdp_h=GOOD["fsdp.h"].replace("#include", '#include "more/b.inc"\n#include'),
          also={"more/b.inc": "int x;\n"})
    for name in ("fsdp_more.h", "examples/use.c"):
        finds("layers", f"{name}: includes src/core/a.h: include fsdp.h",
              **{re.sub(r"\W", "_", name): GOOD[name] + '#include "src/core/a.h"\n'})


LISTED_PARTS = GOOD["docs/architecture.md"]


def test_toc():
    finds("toc", "the list of parts and the files of src/core/ and src/base/ differ in src/core/a.h",
          docs_architecture_md=LISTED_PARTS.replace("src/core/a.h   the first one\n", ""))
    finds("toc", "the list of parts and the files of src/core/ and src/base/ differ in src/core/gone.h",
          docs_architecture_md="src/core/gone.h   no file\n" + LISTED_PARTS)
    finds("toc", "the list of parts has src/core/b.h above src/core/backends.h, which it includes",
          docs_architecture_md="src/core/b.h   the other one\n" +
          LISTED_PARTS.replace("src/core/b.h   the other one\n", ""))


def test_extensions():
    finds("extensions", "fsdp_more.h: fsdpi_a is not its own, src/core/a.h has it",
          fsdp_more_h=GOOD["fsdp_more.h"] + "int x = fsdpi_a();\n")
    finds("extensions", "fsdp_more.h: fsdpi_base is not its own, backends/fsdp_base.h has it",
          fsdp_more_h=GOOD["fsdp_more.h"] + 'char c = "//"[0]; int x = fsdpi_base();\n')
    finds("extensions", "fsdp_more.h: FSDPI_N is not its own, src/core/b.h has it",
          src_core_b_h=GOOD["src/core/b.h"] + "#define FSDPI_N 3\n",
          fsdp_more_h=GOOD["fsdp_more.h"] + "int x[FSDPI_N];\n")
    base = {"src/base/z.h": "static int fsdpi_z(void);\n"}  # names of src/base/ are everyone's
    with tree(fsdp_more_h=GOOD["fsdp_more.h"] + "int x = fsdpi_z();\n", also=base) as root:
        passes("extensions", root)


def test_port():
    """What only Linux has stands in two files; comments, texts and longer names may have its words."""
    for code in ('open("/proc/self/maps", 0)', "fsdpi_syscall(SYS_gettid)", "prctl(1)", "memfd_create(0, 0)",
                 "sched_yield()", "eventfd(0, 0)", "socket(1, SOCK_STREAM | SOCK_CLOEXEC, 0)",
                 'open("/sys/fs/cgroup", 0)', "madvise(x, 1, MADV_DONTFORK)", "fcntl(1, F_OFD_SETLK)"):
        for name in ("src/core/a.h", "fsdp_more.h"):
            finds("port", f"{name}: ", **{re.sub(r"\W", "_", name): GOOD[name] + f"int x = {code};\n"})
    allowed = ('/* reads /proc/self/maps by prctl(1) */ int x = posix_fallocate(0, 0, 1);\n'
               'const char *text = "cannot make it by memfd_create (errno %d)";\n')
    with tree(src_core_a_h=GOOD["src/core/a.h"] + allowed,
              also={"src/base/os.h": "int x = prctl(1);\n"}) as root:
        passes("port", root)


def test_callers():
    def calls(*texts):
        return "/* a.h - it\n\n   Callers: " + "\n   ".join(texts) + SPDX + (
            "#define FSDPI_A 3\ntypedef struct fsdpi_t {\n    int x;\n} fsdpi_t;\nenum { FSDPI_ONE, FSDPI_TWO = 2 };\n"
            "static int fsdpi_a(void) { return fsdpi_far(); }\n")
    finds("callers", "src/core/a.h: its first comment has no line Callers:",
          src_core_a_h=GOOD["src/core/a.h"].replace("Callers: ", "callers: "))
    for text, words in (("b.h and gone.h.", "its callers name gone.h, which does not exist"),
                        ("b.h (fsdpi_b).", "its comment says fsdpi_b, which it does not define"),
                        ("b.h (fsdpi_far).", "its comment says fsdpi_far, which it does not define"),
                        ("backends.h, b.h (fsdpi_a).", "its comment says that backends.h uses fsdpi_a"),
                        ("backends/fsdp_net.h.", "its comment says that backends/fsdp_net.h uses a name of it")):
        finds("callers", f"src/core/a.h: {words}\n", src_core_a_h=calls(text))
    users = {f"src/core/{c}.h": part(f"{c}.h - one", f"int x = {name};\n") for c, name in (
        ("c", "FSDPI_A"), ("d", "sizeof(fsdpi_t)"), ("e", "FSDPI_TWO"))}
    with tree(src_core_a_h=calls("programs; c.h; d.h; e.h; b.h and",
                                 " backends/fsdp_base.h (fsdpi_a), core/b.h\n"
                                 "   (fsdpi_a) and others.\n   Source: torch: gone.h.\n\n   By gone.h. "),
              also=users) as root:
        passes("callers", root)


def test_english():
    one = "/* It is %s the other. */\n"
    for name, words in (("src/core/a.h", "behind"), ("fsdp_more.h", "so many, beside")):
        text = GOOD[name] + one % words * 6
        finds("english", f"{name}: {words.split(', ')[0]}", **{re.sub(r"\W", "_", name): text})
    with tree(src_core_a_h=GOOD["src/core/a.h"] + one % "behind" * 5 + 'int x[] = {"behind"};\n') as root:
        passes("english", root)


def test_functions():
    def function(lines):
        return "static int f(void) {\n" + "    g();\n" * (lines - 2) + "}\n"
    finds("functions", "a function of 101 lines, at most 100",
          src_core_a_h=GOOD["src/core/a.h"] + function(100) + function(101))
    broken = ""
    for line in ("done:", "next: g();", "int x = 3;", "g();", "if (x) {\n} else {\n}", "struct {\n} y;", "{}",
                 '"{";', "// }", "#if A\nif (x) {\n#elif B\nif (y) {\n#else\n{\n#endif\n}"):
        broken += function(60).replace("}\n", line + "\n") + function(60).replace("static int f(void) {\n", "")
    with tree(src_core_a_h=GOOD["src/core/a.h"] + broken) as root:
        out = python(f"{TOOLS}/check_text.py", "functions", cwd=root).stdout
    check(out.count("src/core/a.h:") == 11 and out.count(" lines, at most 100") == 10, out)  # and the note
    more = GOOD["src/core/a.h"] + 'static int x[] = {\n' + "1,\n" * 150 + "};\nstruct s {\n" + "int x;\n" * 150 + "};\n"
    with tree(src_core_a_h=more) as root:
        passes("functions", root)  # neither is a function


def test_other_names():
    """A part that is no *.h is a part."""
    more = {"src/core/more.inc": "static int f(void) {\n" + "    g();\n" * 6000 + "}\n" + "x" * 101 + "\n"}
    use = GOOD["src/core/b.h"].replace('#include "a.h" // a\n', '#include "a.h"\n#include "more.inc"\n')
    finds("functions", "src/core/more.inc:1: a function of 6002 lines", src_core_b_h=use, also=more)
    finds("columns", "src/core/more.inc:6003: 101 columns", src_core_b_h=use, also=more)
    finds("licence", "src/core/more.inc: no line SPDX", src_core_b_h=use, also=more)
    finds("licence", "tests/core/more.inc: no line SPDX", also={"tests/core/more.inc": "int x;\n"})
    finds("layers", "src/core/more.inc: does not begin with #ifndef FSDP_H", src_core_b_h=use, also=more)
    finds("toc", "the files of src/core/ and src/base/ differ in src/core/more.inc", src_core_b_h=use, also=more)
    finds("extensions", "fsdp_more.h: fsdpi_z is not its own, src/core/more.inc has it",
          fsdp_more_h=GOOD["fsdp_more.h"] + "int x = fsdpi_z();\n", also={"src/core/more.inc": "int fsdpi_z();\n"})
    env = dict(os.environ, WARN="-Wall", CWARN="-Wall", FSDP_BUILD="build")
    for also, wanted in ({}, "note: "), (more, "src/core/more.inc has 6003 lines: at most 700"):
        with tree(also=also) as root:
            out = subprocess.run([os.path.join(TOOLS, "check.sh"), "--one", "budget"], cwd=root, env=env,
                                 stdout=subprocess.PIPE, universal_newlines=True, check=False).stdout
        check(wanted in out and ("OK" in out) == (not also), out)


def test_gates_name_what_they_lack():
    """A gate without its compiler is skipped, and says which package has it."""
    with tempfile.TemporaryDirectory() as root:
        os.mkdir(f"{root}/bin")
        for program in ("bash", "cat", "date", "env", "grep", "mkdir", "timeout", "tr", "uname"):
            os.symlink(shutil.which(program), f"{root}/bin/{program}")
        env = {"PATH": f"{root}/bin", "FSDP_BUILD": f"{root}/build", "WARN": "-Wall", "CWARN": ""}
        for gate, package in (("platforms.tcc", "tcc"), ("platforms.zig", "ziglang"), ("musl", "musl-tools"),
                              ("musl_tests.test_bits", "musl-tools"), ("platforms.refused", "clang"),
                              ("aarch64.test_bits", "gcc-aarch64-linux-gnu"), ("text.toc", "python3")):
            out = subprocess.run([os.path.join(TOOLS, "check.sh"), "--one", gate], env=env, check=False,
                                 cwd=os.path.dirname(TOOLS), stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, universal_newlines=True).stdout
            check(f"[  SKIPPED ] check.{gate} (no " in out and f"install {package})" in out, out)


def test_docs():
    def declares(comment, text):
        return GOOD["fsdp_more.h"] + f"/* fsdp_new - it{comment} */\n{text};\n"
    status = "FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_new("
    finds("docs", "fsdp_new: no comment right above that has its name", fsdp_more_h=GOOD["fsdp_more.h"]
          + "FSDP_API int fsdp_new(void);\n")
    finds("docs", "fsdp_new: no field Result\n", fsdp_more_h=declares("", status + "int x)"))
    finds("docs", "fsdp_new: no field Allocates\n", fsdp_more_h=declares(
        "\n   Result  FSDP_OK", status + "fsdp_mesh **out)"))
    some = lambda name, comment: (f"/* {name} - it{comment} */\n" +
                                  status.replace("fsdp_new", name) + "fsdp_mesh **out);\n\n")
    empty = (". Result. Allocates.", "\n   Result, Allocates.", "\n   Result  Allocates  yes",
             "\n   Result\n   Allocates", ". The Result FSDP_OK Allocates nothing")
    finds("docs", *(f"fsdp_{i}: no field Result" for i in range(len(empty))), fsdp_more_h=GOOD["fsdp_more.h"] +
          "\n".join(some(f"fsdp_{i}", comment) for i, comment in enumerate(empty)))
    with tree(fsdp_more_h=GOOD["fsdp_more.h"] + some("fsdp_1", "\n   Result, Allocates  as fsdp_all") +
              some("fsdp_2", "\n   Result      FSDP_OK; IO      Allocates yes")) as root:
        passes("docs", root)


def test_names():
    finds("names", "docs/architecture.md:1: no such name: fsdpi_c",
          docs_architecture_md="| a | `fsdpi_c` |\n")
    gone = ("src/core/gone.h", "`gone.h`", "[gone](gone.md)", "src/gone/", "(../tools/gone.py)", "a.c",
            "src/core/gone/a.h")
    finds("names", *(f"docs/architecture.md:{9 + i}: no such file: " +
                     re.search(r"[\w./]+[\w/]", name.split("](")[-1]).group() for i, name in enumerate(gone)),
          docs_architecture_md=GOOD["docs/architecture.md"] + "".join(f"see {name}.\n" for name in gone))
    there = "see `a.h`, src/core/a.h, src/core/, [parity](parity.md), [b](../src/core/b.h), https://a.b/c.h, *.md.\n"
    with tree(docs_architecture_md=GOOD["docs/architecture.md"] + there) as root:
        passes("names", root)
    finds("names", "docs/architecture.md:3: no such name: fsdp_invented",
          docs_architecture_md="\n```\nfsdp_invented\n```\n")
    finds("names", "docs/architecture.md:3: no such step, pool, stream or mark: GATHER",
          docs_architecture_md="\n```\nfsdpi_a GATHER\n```\n")


def test_tests():
    table, parity = GOOD["CONTRIBUTING.md"], GOOD["docs/parity.md"]
    finds("tests", "CONTRIBUTING.md:3: no such test: test_invented",
          CONTRIBUTING_md=table.replace("`test_all`", "`test_all`, `test_invented`"))
    finds("tests", "CONTRIBUTING.md:4: no such test: all.invented",
          CONTRIBUTING_md=table.replace("all.of_*", "all.invented"))
    finds("tests", "CONTRIBUTING.md:3: a row that names no test",
          CONTRIBUTING_md=table.replace("`test_all`", "test_all"))
    finds("tests", "CONTRIBUTING.md: no table of tests", CONTRIBUTING_md="No table.\n")
    finds("tests", "README.md:5: no such test: all.invented",
          README_md=GOOD["README.md"] + "\n`make test FILTER=all.invented`\n")
    finds("tests", "docs/parity.md:1: no such test: all.invented",
          docs_parity_md=parity.replace("all.works", "all.invented"))
    finds("tests", "docs/parity.md:3: test_more of test_fully_shard_a.py has a test: "
          "tests/core/test_fully_shard_a.c:2", docs_parity_md=parity.replace("absent", "more"))
    finds("tests", "docs/parity.md: no item of the list for the rule SUM of tests/core/test_golden",
          docs_parity_md=parity.replace("SUM", "SUMS"))


def test_ported_tests():
    """Comments "PyTorch: ..." of the tests: their form, their states, and the tests they cover."""
    ported = GOOD["tests/core/test_fully_shard_a.c"]
    own = "\n/* PyTorch: none. Own. */\n"
    new = "TEST(fully_shard_a, new) {}\n"
    bad = [("test_fully_shard_a.c: no comment PyTorch: ... before fully_shard_a.new",
            ported + "\n" + new),
           ("tests/core/test_fully_shard_a.c:2: no such test: all.invented",
            ported.replace("all of it", "as all.works, all.invented")),
           ("tests/core/test_fully_shard_a.c:2: Great is no state: Done, Partly",
            ported.replace(" Done:", " Great:")),
           ("tests/core/test_fully_shard_a.c:2: Own means", ported.replace(" Done:", " Own:")),
           ("tests/core/test_fully_shard_a.c:7: Own means",
            ported + own.replace("Own", "Done") + new),
           ("tests/core/test_fully_shard_a.c:7: no test follows", ported + own),
           ("tests/core/test_fully_shard_a.c:7: no test follows", ported + own + "\n" + new),
           ("tests/core/test_fully_shard_a.c:7: test_done is Partly, but Done at "
            "tests/core/test_fully_shard_a.c:2", ported + "\n/* PyTorch: test_fully_shard_a.py "
            "test_done. Partly: half. */\n" + new)]
    for old, changed in (("test_done, ", "test_done "), (" Done:\n", " Done,\n"),
                         ("it. */", "it */"), ("test_fully_shard_a.py ", ""),
                         ("test_done, test_more. ", "")):
        bad.append(("tests/core/test_fully_shard_a.c:2: write: PyTorch: FILE.py",
                    ported.replace(old, changed)))
    for complaint, text in bad:
        finds("tests", complaint, tests_core_test_fully_shard_a_c=text)
    with tree(tests_core_test_fully_shard_a_c=ported + own + new) as root:
        passes("tests", root)


def test_counts():
    """Numbers of recorded cases: in the file, in its test and in documents."""
    here = {"tests/core/test_golden_train.c": "/* SPDX-License-Identifier: MIT */\n"
            '} files[] = {{"a", 2}, {"b", 1}};\n',
            "tests/core/test_golden_plays.c": 'TEST(c, d) { play_file("events_c.txt", 1, row); }\n',
            "tests/golden/train_a.txt": "\ncase x\ncase y\n", "tests/golden/train_b.txt": "case x\n",
            "tests/golden/events_c.txt": "case x\n"}
    readme = GOOD["README.md"] + "\nIt runs 3 recorded\ntrainings, 1 recorded cases, `a/events_c.txt` (1 cases).\n"

    def counted(**changes):
        with tree(also=dict(here, **{k: v for k, v in changes.items() if "/" in k}),
                  README_md=changes.get("README", readme)) as root:
            return python(f"{TOOLS}/check_text.py", "tests", cwd=root).stdout
    check(counted().startswith("note: "), counted())
    for changes, wanted in [
            ({"tests/golden/train_a.txt": "case x\n"}, "train_a.txt: 1 cases, its test expects 2"),
            ({"tests/golden/events_c.txt": ""}, "events_c.txt: 0 cases, its test expects 1"),
            ({"README": readme.replace("3 ", "43 ")}, "README.md: 43 cases or trainings, their test expects 3"),
            ({"README": readme.replace("1 recorded", "131 recorded")}, "README.md: 131 cases"),
            ({"README": readme.replace("(1 cases", "(2 cases")}, "README.md: 2 cases")]:
        check(wanted in counted(**changes), f"{wanted}: {counted(**changes)}")


PROGRAMS = {"test_all": ["works", "of_a_table/one", "of_a_table/two"],
            "test_fully_shard_a": ["done"]}


def run_tests(root, options="", **results):
    """run_tests.sh over programs in which every test passes, but for these results."""
    for program, tests in PROGRAMS.items():
        lines = []
        for test in tests:
            name = program[5:] + "." + test
            result = results.get(test, results.get(test.split("/")[0], "      OK"))
            if result:
                lines.append(f"echo '[ RUN      ] {name}'; echo '[ {result} ] {name} (1 ms)'")
        path = os.path.join(root, program)
        with open(path, "w", encoding="utf-8") as f:
            f.write("#!/bin/sh\n" + "\n".join(lines) + "\n")
        os.chmod(path, 0o755)
    if not os.path.exists(os.path.join(root, "tools")):
        os.symlink(TOOLS, os.path.join(root, "tools"))
    r = subprocess.run(f"tools/run_tests.sh {options} ./test_all ./test_fully_shard_a", cwd=root,
                       shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                       stdin=subprocess.DEVNULL, universal_newlines=True,
                       env=dict(os.environ, WARN="-Wall", FSDP_BUILD="build"))
    return r.returncode, r.stdout


def test_tests_that_ran():
    """What a document names has to have passed in this run."""
    with tree() as root:
        ran = "--ran=tests.ran"
        status, out = run_tests(root, ran)
        check(status == 0 and "5 passed, 0 failed, 0 skipped" in out, out)
        with open(os.path.join(root, "tests.ran"), encoding="utf-8") as f:
            check(f.read() == "".join(f"{p}\t{p[5:]}.{t}\tOK\n" for p, tests in PROGRAMS.items()
                                      for t in sorted(tests)), "the file of what ran")
        for result, words in (("", "did not run"), (" SKIPPED", "was skipped")):
            status, out = run_tests(root, ran, done=result)
            check(status and f"CONTRIBUTING.md:4: fully_shard_a.done {words}" in out, out)
            check(f"tests/core/test_fully_shard_a.c:2: fully_shard_a.done {words}" in out, out)
        status, out = run_tests(root, ran, of_a_table=" SKIPPED")
        check(status and "CONTRIBUTING.md:4: all.of_a_table/one was skipped" in out, out)
        status, out = run_tests(root, ran, **{"of_a_table/two": " SKIPPED"})
        check(status and "CONTRIBUTING.md:4: all.of_a_table/two was skipped" in out, out)
        check("CONTRIBUTING.md:3" not in out, f"a program ran if one of its tests did: {out}")
        status, out = run_tests(root, done=" SKIPPED")
        check(status == 0 and "CONTRIBUTING.md" not in out, f"only where it is asked: {out}")


def test_run_tests_says_why_it_skips():
    """At the end, each reason once, with the number of tests; and for a terminal one line of progress
    in place of programs in which nothing failed."""
    with tree() as root:
        results = {"done": " SKIPPED", "works": " SKIPPED"}
        status, out = run_tests(root, **results)
        check(status == 0 and "2 passed, 0 failed, 2 skipped" in out, out)
        for program in PROGRAMS:  # the harness adds the reason in brackets
            path = os.path.join(root, program)
            with open(path, encoding="utf-8") as f:
                text = f.read().replace("(1 ms)", "(no torch: pip install torch)")
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
        command = "tools/run_tests.sh ./test_all ./test_fully_shard_a"
        env = dict(os.environ, JOBS="2")
        out = subprocess.run(command, cwd=root, shell=True, stdout=subprocess.PIPE, env=env,
                             universal_newlines=True).stdout
        check("\nskipped, and why:\n     2  no torch: pip install torch\n" in out, out)
        check("[ RUN      ] all.works" in out and "programs" not in out, out)
        if not shutil.which("script"):
            raise Skip("no script: apt-get install bsdutils")

        def on_a_terminal():
            return subprocess.run(["script", "-qec", command, "/dev/null"], cwd=root, env=env,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  universal_newlines=True).stdout
        out = on_a_terminal()
        check("2 of 2 programs, 0 tests failed, about 0 min 0 s left" in out, out)
        check("RUN " not in out and "2 passed, 0 failed, 2 skipped" in out, out)
        with open(os.path.join(root, "test_all"), "a", encoding="utf-8") as f:
            f.write("echo '[ RUN      ] all.more'; echo '[  FAILED  ] all.more (1 ms)'; exit 1\n")
        out = on_a_terminal()
        check("[  FAILED  ] all.more" in out and "fully_shard_a.done" not in out, out)
        check("2 of 2 programs, 1 tests failed" in out, out)


VARIANTS = """# a comment | with | these | signs | of | the table
$NET = A=1 B=2
# name  | make       | target | tags | night          | environment
net     | GLOO=yes   | test   | gloo | night.gloo     | $NET
        |            | -      |      | nccl:-gloo     |
shm     | examples   | test   | shm  | night.shm      |
fast    | 'C=-O -g'  | check  | bits | bits:night.bits | C=3
asan    |            | check  | asan | night.asan     |
"""
SOURCES = {
    "core/test_plain.cpp": "/* of GLOO and\n   NIGHT */\nTEST(a, b) { say(\"NCCL\"); } // BITS\n",
    "core/test_file.c": "#define TAGS GLOO | AT_NIGHT(ASAN)\nTEST(a, c) {}\n",
    "core/test_one.c": "#define TAGS NO(ASAN)\nTEST(a, d,\n     AT_NIGHT(GLOO)) {}\n",
    "net/test_only.c": "#define TAGS NO(SHM) | GLOO\nTEST(a, e, NO(GLOO) | NCCL) {}\n",
    "net/test_rows.c": "#define TAGS AT_NIGHT(ASAN)\nTEST_P(a, f, rows, row->x ? MANY_RANKS : BITS | ASAN) {}\n",
    "net/test_twice.c": "#include \"test_only.c\"\n",
    "net/conformance.c": "TEST(a, g, NIGHT) {}\n",
    "net/probe.c": "TEST(a, h, GLOO) {}\n",
}


@contextlib.contextmanager
def variants():
    """A tree of this table and these sources, and a function that runs a command there."""
    with tempfile.TemporaryDirectory() as root:
        os.symlink(TOOLS, os.path.join(root, "tools"))
        for name, text in [("variants", VARIANTS)] + list(SOURCES.items()):
            path = os.path.join(root, "tests", name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
        env = dict(os.environ, BUILD="b")
        yield root, lambda command: sh(command, cwd=root, env=env)


def test_variants():
    """What is built and run comes from the table and from what the tests say, not from comments."""
    with variants() as (_, run_there):
        def says(words, expected):
            out = run_there(f"tools/variants.sh {words}")
            check(out.split() == expected.split(), f"{words}: {out}")
        says("list test", "net shm")
        says("list check", "fast asan")
        says("list nightly", "net shm fast asan")
        says("programs gloo", "test_file test_only test_twice")
        says("programs night.gloo", "test_one")
        says("programs gloo:nccl", "test_file test_only test_twice")
        says("programs nccl:-gloo", "test_only test_twice")
        says("programs shm", "test_file test_one test_plain test_rows conformance")
        says("programs night.shm", "conformance")
        says("programs asan", "test_plain test_rows conformance")
        says("programs night.asan", "test_file test_rows")
        says("programs bits", "test_rows")
        says("programs night.bits", "test_rows")
        says("programs tsan", "")
        says("make test net", "BUILD=b/net GLOO=yes b/net/tests/test_file b/net/tests/test_only "
             "b/net/tests/test_twice")
        says("make check fast", "BUILD=b/fast 'C=-O -g' b/fast/tests/test_rows")
        says("make nightly net | wc -l", "0")  # one command
        says("make any net", "BUILD=b/net GLOO=yes b/net/tests/test_file b/net/tests/test_one "
             "b/net/tests/test_only b/net/tests/test_twice GLOO=yes "  # one for each line
             "b/net/tests/test_only b/net/tests/test_twice")
        says("make test shm", "BUILD=b examples " + " ".join(
            f"b/tests/{n}" for n in "test_file test_one test_plain test_rows conformance".split()))
        says("runs check fast", "bits FSDP_BUILD=b/fast C=3 b/fast/tests/test_rows")
        says("runs nightly net", "night.gloo FSDP_BUILD=b/net A=1 B=2 b/net/tests/test_one "
             "nccl:-gloo FSDP_BUILD=b/net b/net/tests/test_only "
             "nccl:-gloo FSDP_BUILD=b/net b/net/tests/test_twice")


def test_run_tests_of_a_variant():
    """Programs that have tests with the tags run with them, in the environment of the table."""
    script = """#!/bin/sh
case "$*" in
*--list*--tags=gloo:-slow*) [ "${0##*/}" != test_file ] || echo a.c ;;
*--list*) [ "${0##*/}" = test_twice ] || echo a.c ;;
*) echo "[ RUN      ] a.c"; echo "[       OK ] a.c ($A $B $FSDP_BUILD ${0##*/} $*)" ;;
esac
"""
    with variants() as (root, run_there):
        os.makedirs(os.path.join(root, "b/net/tests"))
        for name in "test_file", "test_only", "test_one", "test_twice":
            path = os.path.join(root, "b/net/tests", name)
            with open(path, "w", encoding="utf-8") as f:
                f.write(script)
            os.chmod(path, 0o755)

        def ran(options, *lines):
            out = run_there(f"tools/run_tests.sh {options} variant:net")
            found = sorted(re.findall(r"OK \] a\.c \((.*)\)", out))
            check(found == sorted(lines), f"{options}: {out}")
        ran("", "1 2 b/net test_file --tags=gloo", "1 2 b/net test_only --tags=gloo")
        ran("--tags=-slow", "1 2 b/net test_file --tags=gloo:-slow")
        ran("--filter=c", "1 2 b/net test_file --tags=gloo --filter=c",
            "1 2 b/net test_only --tags=gloo --filter=c")
        ran("--target=nightly", "1 2 b/net test_one --tags=night.gloo",
            "  b/net test_only --tags=nccl:-gloo")


def built():
    """{name: path} of the test programs over shared memory."""
    root = os.path.dirname(TOOLS)
    build = os.path.join(root, os.environ.get("FSDP_BUILD", "build"), "tests")
    if not os.path.exists(os.path.join(build, "conformance")):
        raise Skip(f"no tests in {build}")
    return {name: os.path.join(build, name) for name in sorted(os.listdir(build))
            if name.startswith("test_") and "." not in name}


def test_variants_miss_nothing():
    """A program with a test that has a tag is among those that are built for the tag."""
    programs = built()
    tags = [night + tag for tag in "shm asan tsan bits gloo nccl".split() for night in ("", "night.")]
    known = {tag: sh(f"{TOOLS}/variants.sh programs {tag}").split() for tag in tags}
    for name, path in programs.items():
        others = ":".join(tag for tag in tags if name not in known[tag])
        told = others and sh(f"{path} --list --tags={others}")
        check(not told, f"{name} is missing from programs of {others}: {told}")


def test_variants_run_every_test():
    """Each test is one of some variant, and no test has a tag that the table does not have."""
    programs, root = built(), os.path.dirname(TOOLS)
    with open(os.path.join(root, "tests/variants"), encoding="utf-8") as f:
        lines = [line.split("|") for line in f if line.count("|") == 5 and line[0] not in "#$"]
    ran = {tag for cells in lines
           for tag in re.findall(r"(?<![-\w])[a-z][\w.]+", f"{cells[3]}:{cells[4]}")}
    with open(os.path.join(root, "tests/harness.h"), encoding="utf-8") as f:
        tags = re.findall(r'^    X\(\w+, "(\w+)"\)', f.read(), re.M)
    check(len(tags) > 10 and "shm" in ran, f"{tags} {ran}")
    nowhere = {night + tag for tag in tags for night in ("", "night.")} - ran - {"slow", "many_ranks"}
    for name, path in programs.items():
        told = sh(f"{path} --list --tags={':'.join(sorted(nowhere))}")
        check(not told, f"{name}: no variant runs these tests by one of their tags: {told}")
        some = sh(f"{path} --list --tags={':'.join(sorted(ran))}").splitlines()
        missing = set(sh(f"{path} --list").splitlines()) - set(some)
        check(not missing, f"{name}: no variant runs {missing}")


def test_with_torchrun():
    """The command runs with the torchrun that is there, that of the environment, or without one."""
    with tempfile.TemporaryDirectory() as root:
        for name in ("bash", "cat", "ln", "mkdir", "rm", "sh", "tail", "timeout", "tr"):
            os.symlink(shutil.which(name), os.path.join(root, name))

        def script(name, text):
            os.makedirs(os.path.dirname(os.path.join(root, name)) or root, exist_ok=True)
            with open(os.path.join(root, name), "w", encoding="utf-8") as f:
                f.write("#!/bin/sh\n" + text + "\n")
            os.chmod(os.path.join(root, name), 0o755)

        def says(words, where):
            out = subprocess.run([os.path.join(TOOLS, "with_torchrun.sh"), "venv", "sh", "-c",
                                  "command -v torchrun; exit 3"], cwd=root, env={"PATH": root},
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 universal_newlines=True)
            check(words in out.stderr and out.stdout.strip() == where, str(out))
            check(out.returncode == 3, "the status is that of the command")
        says("none here, and no python3", "")
        script("python3", "echo no module venv; exit 1")
        says("none here, and pip could not install it: no module venv", "")
        script("python3", f"mkdir -p venv/bin; cat >venv/bin/pip <<'E'\n#!{root}/sh\necho no network; "
                          "exit 2\nE\n/bin/chmod +x venv/bin/pip")
        says("none here, and pip could not install it: no network", "")
        check(not os.path.exists(os.path.join(root, "venv")), "half an environment is removed")
        for program in ("torchrun", "python"):
            script(f"venv/bin/{program}", "echo 2.15")
        says("venv: torch 2.15", os.path.join(root, "venv/only/torchrun"))
        script("torchrun", "exit 0")
        says(f"torchrun: {root}/torchrun", os.path.join(root, "torchrun"))


def script(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write("#!/bin/sh\n" + text + "\n")
    os.chmod(path, 0o755)


def test_gpu_test_plans():
    """What ends in time runs, in the order of the table; those beside others share the time."""
    table = "first a 10 alone x\nnets b 30 beside x y\nnets c 100 beside x\nlast d 5 alone x\n"

    def plan(seconds, jobs):
        return subprocess.run(["tools/gpu_test.sh", "--plan", str(seconds), str(jobs)], input=table,
                              stdout=subprocess.PIPE, universal_newlines=True, check=True,
                              cwd=os.path.dirname(TOOLS)).stdout
    check(plan(0, 1) == "left first a\nleft nets b\nleft nets c\nleft last d\n")
    check(plan(20, 1) == "run first a\nleft nets b\nleft nets c\nrun last d\n")
    check(plan(40, 1) == "run first a\nrun nets b\nleft nets c\nleft last d\n")
    check(plan(20, 3) == "run first a\nrun nets b\nleft nets c\nleft last d\n")
    check(plan(145, 1) == "run first a\nrun nets b\nrun nets c\nrun last d\n")
    out = sh("tools/gpu_test.sh --table", env={**os.environ, "FSDP_GPUS": "1"},
             cwd=os.path.dirname(TOOLS))
    lines = [line.split() for line in out.splitlines()]
    check(lines[0][:2] == ["first", "cuda"] and all(len(line) > 4 for line in lines), out)
    check(all(line[2].isdigit() and line[3] in ("alone", "beside") for line in lines), out)
    wanted = {"first", "kernels", "parity", "ranks", "faults", "nets"}
    seconds = sum(float(line[2]) / (1 if line[3] == "alone" else 4) for line in lines
                  if line[0] in wanted)
    check(seconds <= 440, f"{seconds} s, beside a build of 40 s more than eight minutes")
    check([line[0] for line in lines if line[0] not in wanted][0] == "sanitizer", out)
    out = sh("tools/gpu_test.sh --list", env={**os.environ, "FSDP_GPUS": "2"},
             cwd=os.path.dirname(TOOLS))
    check(out.index("multi/conformance.W=2") < out.index("ranks/"), "two GPUs come first")


def test_gpu_test_runs():
    """Names run side by side, and what is over its time is left out and told."""
    with tempfile.TemporaryDirectory() as root:
        os.mkdir(f"{root}/tests")
        script(f"{root}/tests/test_gpu_first", 'echo "[       OK ] $2"')
        # each waits until the other has started
        script(f"{root}/tests/conformance",
               f'case $2 in *W=2:*) me=a you=b ;; *) me=b you=a ;; esac; touch {root}/$me\n'
               f'while [ ! -e {root}/$you ]; do sleep 0.01; done; echo "[       OK ] $2"; '
               "[ $me = a ]")
        env = {**os.environ, "FSDP_BUILD": root, "FSDP_GPUS": "1", "FSDP_GPU_JOBS": "2"}

        def runs(words, status):
            out = subprocess.run(f"tools/gpu_test.sh {words}", shell=True, env=env,
                                 stdout=subprocess.PIPE, universal_newlines=True, check=False,
                                 cwd=os.path.dirname(TOOLS))
            check(out.returncode == status, out.stdout)
            return out.stdout
        out = runs("first/cuda ranks/conformance.W=2 ranks/conformance.W=3", 1)
        check("PASS first/cuda (" in out and "PASS ranks/conformance.W=2 (" in out, out)
        check("FAIL ranks/conformance.W=3 (" in out, out)
        check("2 passed, 1 failed, 0 skipped, 0 left out for time" in out, out)
        out = runs("--minutes=0 first/cuda ranks/conformance.W=1", 0)
        check("left out for time: first/cuda ranks/conformance.W=1" in out, out)
        check("0 passed, 0 failed, 0 skipped, 2 left out for time" in out, out)
        env["FSDP_GPU_SINCE"] = str(int(time.time()) - 180)  # the duration of a build
        out = runs("--minutes=5 nets/test_replicate nets/test_plan", 0)
        check("SKIP nets/test_replicate (no " in out and "LEFT nets/test_plan" in out, out)


def test_one_gpu():
    """From NCCL 2.30 on ranks share a GPU as they are; before, each seems to be a host."""
    with tempfile.TemporaryDirectory() as root:
        script(f"{root}/ldd", f'echo "\tlibnccl.so.2 => {root}/libnccl.so.2 (0x0)"')

        def gives(version, expected, missing, **more):
            with open(f"{root}/libnccl.so.2", "w", encoding="utf-8") as f:
                f.write(f"\0NCCL version {version}\0\n")
            out = sh("tools/one_gpu.sh env", cwd=os.path.dirname(TOOLS), env={
                "PATH": f"{root}:{os.environ['PATH']}", "RANK": "3", **more})
            for line in expected:
                check(line in out.splitlines(), f"{version}: no {line}: {out}")
            for name in missing:
                check(name not in out, f"{version}: {name}: {out}")
        new = ["NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_MAX_CTAS=2", "CUDA_VISIBLE_DEVICES=0"]
        old = ["NCCL_HOSTID=fsdp3", "NCCL_P2P_DISABLE=1", "NCCL_MAX_CTAS=2"]
        for version in ("2.30.3", "2.31.2", "3.1.0"):
            gives(version, new, ["HOSTID", "P2P_DISABLE"])
        for version in ("2.28.9", "2.9.6"):
            gives(version, old, ["MULTI_RANK"])
        gives("2.30.3", old, [], NCCL_MULTI_RANK_GPU_ENABLE="0")
        os.remove(f"{root}/ldd")
        check("NCCL_HOSTID=fsdp" in sh("tools/one_gpu.sh env", cwd=os.path.dirname(TOOLS)),
              "a program without NCCL")


FAILS = """static int fsdpi_fails(int x) {
    if (x) return fsdp_fail(w, FSDP_ERR_IO, "[E101] x is %d: "
                            "give 0", x); // "[E103] a comment"
    fsdpi_text_add(error, "[E102] rank %d: no y", (int)boot->rank);
    if (!m) return fsdpi_invalid_arg(w, "[E103] %s: %s is NULL", call, which);
    return fsdpi_world_fail(w, FSDP_OK, "%s", error);
}
"""
LIST = """# Error texts

- Words of
  two lines.

## NULL arguments

Words.

- E103

## E1: Arguments

Words.

- E101 IO: `x is <x>: give 0` Look where x was set.
- E102: `rank <rank>: no y`
"""


def errors(code, listed, *args):
    """What the tool says of this code and this list, and the list afterwards."""
    with tree(src_core_a_h=GOOD["src/core/a.h"] + code) as root:
        path = os.path.join(root, "docs", "errors.md")
        with open(path, "w", encoding="utf-8") as f:
            f.write(listed)
        r = python(f"{TOOLS}/errors", *args, cwd=root)
        with open(path, encoding="utf-8") as f:
            return r.returncode, r.stdout, f.read()


def fails(text):
    return FAILS + f"int i = fsdp_fail(w, 1, {text});\n"


def test_errors():
    check(errors(FAILS, LIST) == (0, "note: 3 error texts\n", LIST), str(errors(FAILS, LIST)))
    four = LIST + "- E1000 OK: `z`\n"
    info = 'int i = fsdpi_boot_log(b, FSDP_LOG_INFO, "no warning");\n'
    check(errors(FAILS + info + 'int j = fsdp_fail(w, FSDP_OK, "[E1000] z");\n', four)[0] == 0, four)
    row_101, row_102 = (line + "\n" for line in LIST.split("\n") if line.startswith(("- E101", "- E102")))
    z = "- E104 OK: `z`\n"
    for code, listed, wanted in [
            (fails('"no z"'), LIST, 'without an id: "no z"'),
            (fails('x ? "[E104] z" : "y"'), LIST + z, ': "y"'),
            (fails('"%s", "no z"'), LIST, 'without an id: "no z"'),
            (FAILS + 'int i = fsdpi_text_add(error, "no z");\n', LIST, 'without an id: "no z"'),
            (FAILS + 'void f(void) { fsdp_warn(w, "no z"); }\n', LIST, 'without an id: "no z"'),
            (FAILS + 'int i = fsdpi_boot_log(b, FSDP_LOG_WARN, "no z");\n', LIST, 'an id: "no z"'),
            (FAILS + 'void f(void) { fsdpi_log(w, FSDP_LOG_ERROR, 1, "no z"); }\n', LIST, 'an id: "no z"'),
            (FAILS + "FSDP_PRINTF(1, 2)\nstatic int fsdpi_new(const char *f, ...);\n", LIST,
             "src/core/a.h:23: fsdpi_new: has its text an id?"),
            (fails('"[E101] z"'), LIST, "src/core/a.h:22: E101 is taken"),
            (fails('"[E104] z"'), LIST, "src/core/a.h:22: E104 is not in docs/errors.md"),
            (fails('"[E1000] z"'), LIST, "src/core/a.h:22: E1000 is not in docs/errors.md"),
            (fails('"[E203] z"'), LIST, "E203: docs/errors.md has no section for it"),
            (fails('"[E104] %s: m is NULL: pass it", f'), LIST, "E104 is not in docs/errors.md"),
            (FAILS, LIST.replace("- E103\n", "- E103, E104\n"), "docs/errors.md: E104 is in no source"),
            (FAILS, LIST.replace("- E103\n", ""), "E103 is not in docs/errors.md"),
            (FAILS, LIST + z, "docs/errors.md: E104 is in no source"),
            (FAILS, LIST + row_102, "docs/errors.md: E102 stands twice"),
            (FAILS, LIST + z.replace("z`", "z"), "docs/errors.md: not understood: - E104"),
            (FAILS, LIST + "| E104 | `z` |\n", "docs/errors.md: not understood: | E104"),
            (fails('"[E104] z"'), LIST + z.replace("OK", "?"), "E104 has no status"),
            (fails('"[E104] " x'), LIST + z.replace("`z`", "`` *"), "not understood"),
            (FAILS.replace("give 0", "give 1"), LIST, "is not what the sources say"),
            (FAILS.replace("FSDP_ERR_IO", "FSDP_OK"), LIST, "is not what the sources say"),
            (FAILS, LIST.replace("- Words of\n  two lines.", "Words.\n"), "is not what the sources say"),
            (FAILS, LIST.replace(row_101 + row_102, row_102 + row_101), "is not what the sources")]:
        status, text, after = errors(code, listed)
        check(status == 1 and wanted in text and after == listed, f"{wanted}: {status}: {text}")


def test_errors_of_macros():
    """A macro hides no text: neither the text, nor the call, nor the name of the function."""
    for code in ['#define FSDPI_TEXT_Z "no z"\n' + "int i = fsdp_fail(w, 1, FSDPI_TEXT_Z);\n",
                 '#define fsdpi_z "no z"\n' + "int i = fsdp_fail(w, 1, x ? fsdpi_z : fsdpi_z);\n",
                 '#define Z(x) "no " x\n' + 'int i = fsdp_fail(w, 1, Z("z"));\n',
                 '#  define Y "no z"\n#define Z Y\n' + "int i = fsdp_fail(w, 1, Z);\n",
                 '#define Z "no z"\n' + 'int i = fsdp_fail(w, 1, "%s", Z);\n',
                 'static const char fsdpi_z[] = "no z";\n' + "int i = fsdp_fail(w, 1, fsdpi_z);\n",
                 "#define Z fsdp_fail\n" + 'int i = Z(w, 1, "no z");\n',
                 "#define Z(...) fsdp_fail(w, __VA_ARGS__)\n" + 'int i = Z(1, "no z");\n',
                 "#define Z(...) fsdp_fail(__VA_ARGS__)\n" + 'int i = Z(w, 1, "no z");\n',
                 "#define Z(w, ...) fsdp_fail(w, FSDP_ERR_IO, __VA_ARGS__)\n" + 'int i = Z(w, "no z");\n',
                 "#define Z(w, text) \\\n    fsdp_fail(w, FSDP_ERR_IO, \\\n    text)\n" + 'int i = Z(w, "no z");\n',
                 "#define Y(t) fsdpi_invalid_arg(w, t)\n#define Z(t) Y(t)\n" + 'int i = Z("no z");\n',
                 "#define Z(...) fsdpi_text_add(error, __VA_ARGS__)\n" + 'int i = (Z("no z"), 1);\n',
                 '#define Z(w) fsdp_fail(w, FSDP_ERR_IO, "no z")\n',
                 '#define Z(w) \\\n    fsdp_warn(w, "no z")\n']:
        status, text, _ = errors(FAILS + code, LIST)
        check(status == 1 and "a text without an id: \"no " in text, f"{code}: {status}: {text}")
    wrapper = FAILS + '#define Z(w, ...) fsdp_fail(w, FSDP_ERR_IO, __VA_ARGS__)\nint i = Z(w, "[E104] z is %d", k);\n'
    status, text, after = errors(wrapper, LIST, "-o", "docs/errors.md")
    check(status == 0 and after == LIST + "- E104 IO: `z is <k>`\n", text + after)


def test_errors_makes():
    """-o: entries of new ids; what is written by hand stays."""
    write = ["-o", "docs/errors.md"]
    more = FAILS + ('int i = fsdp_fail(w, s, "[E1000] z");\nvoid f(void) { fsdp_warn(w, "[E104] %s", z); }\n'
                    'int j = fsdpi_boot_log(b, FSDP_LOG_WARN, "[E105] v | w");\n'
                    'int k = fsdpi_invalid_arg(w, "[E106] fsdp_x: y or z is NULL: pass both");\n')
    status, text, after = errors(more, LIST, *write)
    check(status == 1 and "E1000 has no status in" in text, text)
    check(after == LIST.replace("- E103\n", "- E103, E106\n") +
          "- E104 OK: `<z>`\n- E105 OK: `v | w`\n- E1000 ?: `z`\n", after)
    by_hand = LIST.replace("`x is <x>: give 0`", "`x is <its value>` *")
    for listed in (LIST.replace("IO: `x is", "CORRUPT: `z"), by_hand):
        status, text, after = errors(FAILS, listed, *write)
        check(status == 0 and after == (by_hand if listed is by_hand else LIST), text + after)
    status, text, after = errors(FAILS.replace("[E102] rank", "[E101] rank"), LIST, *write)
    check(status == 1 and "E102 is in no source: its entry has gone" in text, text)
    check("E102" not in after and "E101" in after, after)
    broken = LIST.replace("give 0`", "give 0")
    status, text, after = errors(FAILS, broken, *write)
    check(status == 1 and "not understood: - E101" in text and after == broken, text)


def test_errors_wraps():
    """Long entries have lines of 120 columns, none of which begins an item, and are read again."""
    words = " ".join(["- 1, 2) + `*` x"] * 30)
    code = FAILS.replace("no y", words)
    status, text, after = errors(code, LIST, "-o", "docs/errors.md")
    lines = after.split("\n")
    check(status == 0 and max(map(len, lines)) <= 120 and len(lines) > LIST.count("\n") + 2, text + after)
    check(not re.search(r"^  ([-+*>#] |\d+[.)] )", after, re.M), after)
    check(" ".join(after.split()).endswith("- E102: ``rank <rank>: " + words + "``"), after)
    check(errors(code, after)[0] == 0, after)


HOUSE = {  # rooms, lowest first
    "src/core/a.h": '#ifndef FSDP_H\n#include "../../fsdp.h"\n#endif\n/*\n#include "b.h"\n*/\n// #include "c.h"\n',
    "src/core/b.h": '#include "../../fsdp.h" // and src/core/*.h\n# include "a.h"\n/* the end */\n',
    "src/core/c.h": '#include "../core/b.h"\n#include <math.h>\n#include "elsewhere.h"\n#include "a.h"\n',
    "fsdp.h": '/* Use it so:\n    #include "fsdp.h"\n*/\n#include "src/core/b.h"\n#include "src/core/c.h"\n',
    "src/plan/x.h": '#include "../../fsdp_plan.h"\n', "fsdp_more.h": '#include "fsdp.h"\n',
    "src/plan/y.h": '#include "../../fsdp_plan.h"\n#include "x.h"\n',
    "fsdp_plan.h": '#include "fsdp.h"\n#include "src/plan/y.h"\n', "backends/README.md": "no room\n"}


def floors(picture=None, **changes):
    """What the gate says of this house and its picture, or of the one that it draws; the picture."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in {**HOUSE, **changes, "docs/floors.svg": picture or ""}.items():
            os.makedirs(os.path.dirname(os.path.join(root, name)), exist_ok=True)
            with open(os.path.join(root, name), "w", encoding="utf-8") as f:
                f.write(text)
        for args in [["-o", "docs/floors.svg"]] * (picture is None) + [[]]:
            r = python(f"{TOOLS}/floors", *args, cwd=root)
        with open(os.path.join(root, "docs/floors.svg"), encoding="utf-8") as f:
            return r.returncode, r.stdout, f.read()


def test_floors():
    status, text, drawn = floors()
    check(status == 0 and text == "note: 8 files on 7 floors\n", text)
    rooms = re.findall(r'text-anchor="end">(\d)<|^<text x="\d+" y="\d+">([\w.]+)(?: <tspan.*>(\d+)<)?',
                       drawn, re.M)
    expected = ("6 fsdp_plan.h:2 5 y.h:1 4 x.h:1 fsdp_more.h 3 fsdp.h:4 2 c.h:1 1 b.h:2 0 a.h:2").split()
    check([floor or name + ":" * bool(users) + users for floor, name, users in rooms] == expected, drawn)
    for changed in ({"src/core/b.h": "\n"}, {"src/core/d.h": "\n"}):
        status, text, after = floors(drawn, **changed)
        check(status == 1 and "docs/floors.svg is not what" in text and after == drawn, text)
    for changed, wanted in [({"src/core/a.h": '#include "c.h"\n'}, ("src/core/a.h", "src/core/c.h")),
                            ({"src/core/a.h": '#include "../../fsdp_more.h"\n'}, ("src/core/a.h", "fsdp_more.h")),
                            ({"src/core/a.h": "#include <core/c.h>\n"}, ("src/core/a.h", "src/core/c.h")),
                            ({"src/core/a.h": '#include "core/c.inc"\n', "src/core/c.inc": '#include "c.h"\n'},
                             ("src/core/a.h", "src/core/c.inc", "src/core/c.h")),
                            ({"src/plan/x.h": '#include "y.h"\n'}, ("src/plan/x.h", "src/plan/y.h"))]:
        status, text, _ = floors(**changed)
        check(status == 1 and "floors: a circle: " in text, text)
        check(all(f"{name} -> " in text for name in wanted), text)


def test_floors_have_room():
    """No room lies on another one or on another folder's column, and names fit."""
    names = {f"{folder}/{'long' * (k % 3)}_{k}.h": "\n" for k in range(24)
             for folder in ("src/core", "backends", "src/plan", "src/dtensor", "src/checkpoint")}
    names.update({f"fsdp_{folder}.h": HOUSE["fsdp_more.h"] for folder in ("dtensor", "checkpoint")})
    status, text, drawn = floors(**names)
    check(status == 0, text)
    boxes = [(float(x), int(y), float(x) + float(w), int(y) + int(h), style, name)
             for style, x, y, w, h, name in re.findall(
                 r'<rect class="(\w+)" x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="(\d+)" rx="2"/>\n'
                 r"<text [^>]*>(.*)</text>", drawn)]
    check(len(boxes) == len(names) + 8, f"{len(boxes)} rooms")
    status, text, _ = floors(**{"src/dtensor/a_name_of_many_letters.h": "\n"})
    check(status == 1 and "many_letters.h is wider than its column" in text, text)
    columns = {style: (min(b[0] for b in boxes if b[4] == style), max(b[2] for b in boxes if b[4] == style))
               for style in {b[4] for b in boxes}}
    check(columns["core"][1] < columns["backends"][0], f"{columns}")
    check(columns["dtensor"][1] < columns["plan"][0] <= columns["plan"][1] < columns["checkpoint"][0],
          f"{columns}")
    width = int(re.search(r'viewBox="0 0 (\d+) ', drawn).group(1))
    for i, a in enumerate(boxes):
        check(0 < a[0] and a[2] < width and a[0] + 6.5 * len(re.sub("<.*?>", "", a[5])) < a[2], f"{a}")
        for b in boxes[:i]:
            check(a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], f"{a} {b}")

MUTATED = """/* src/core/small.h - SPDX-License-Identifier: MIT */
#include <unistd.h>
enum { FSDPI_RED, FSDPI_GREEN, FSDPI_COUNT };
static int fsdpi_least(int a, int b) { return a < b ? a : b; }
// A comment with a < b, and "a string" { ( of which nothing is a mutant.
static int fsdpi_sum(const int *list, int n) {
    int values[4] = {0}, sum = 0;
    (void)values;
    for (int i = 0; i < n; i++) {
        if (list[i] > 0 && n != 7) sum += list[i];
    }
    return sum - (n == 1);
}
static int fsdpi_color(int x) {
    switch (x) {
    case FSDPI_RED: return FSDPI_GREEN;
    default: break;
    }
    return 7;
}
static void fsdpi_clear(int *list, int n) {
    for (; n > 0; usleep(9999)) list[--n] = 0; // without its statement this has no end, but sleeps
}
"""
MUTATED_MAKEFILE = """probes:
build/%: tests/%.c src/core/small.h
\t@mkdir -p $(@D)
\t@cc $(CPPFLAGS) $(CFLAGS) $(WARN) -I. -o $@ $<
"""
MUTATED_VARIANTS = """#!/bin/sh
[ $1 = runs ] || { echo COLOR=red probes build/test_small && exit; }
printf 'shm\\tWORDS=two build/%s\\n' test_small test_broken
"""
MUTATED_TEST = """/* SPDX-License-Identifier: MIT */
#include <stdio.h>
#include <string.h>
#include "src/core/small.h"
int main(int argc, char **argv) {
    int list[] = {1, -2, 3}, last = argc > 1 && !strstr(argv[argc - 1], "first"), good;
    if (argc > 1 && !strcmp(argv[1], "--list")) return printf("small.first\\nsmall.second\\n") < 0;
    good = last ? fsdpi_sum(list, 3) == 4 : fsdpi_least(list[0], list[1]) == -2;
    if (last) fsdpi_clear(list, 3), good &= !list[0] && !list[2];
    return !good;
}
"""


EQUIVALENT = """equivalent fsdpi_least compare
= return a < b ? a : b;
# equal values
"""


def mutate(root, *args, entries="", status=0):
    """What tools/mutate says of a small library in this directory, whose tests see some of it."""
    files = {"src/core/small.h": MUTATED, "Makefile": MUTATED_MAKEFILE,
             "tools/variants.sh": MUTATED_VARIANTS, "tests/test_small.c": MUTATED_TEST,
             "tests/test_broken.c": MUTATED_TEST.replace("!good", "1"), "tools/mutations.txt": entries + EQUIVALENT}
    tree = os.path.join(root, "tree")
    for name, text in files.items():
        os.makedirs(os.path.join(tree, os.path.dirname(name)), exist_ok=True)
        with open(os.path.join(tree, name), "w", encoding="utf-8") as f:
            f.write(text)
    os.chmod(os.path.join(tree, "tools/variants.sh"), 0o755)
    sh("git init -q && git add .", cwd=tree)
    r = python(f"{TOOLS}/mutate", "--tree", tree, "--scratch", os.path.join(root, "copy"), *args)
    check(r.returncode == status, f"mutate {args}: status {r.returncode}: {r.stdout}")
    return r.stdout


def test_mutants_of_a_source():
    """Each operator makes its mutants, and none of what is no expression or is listed as equivalent."""
    with tempfile.TemporaryDirectory() as root:
        names = [line.split("  ")[0][len("src/core/small.h:fsdpi_"):] for line in mutate(root, "--list").split("\n")]
        for wanted in ["sum:compare:1", "sum:condition:2", "sum:statement:1", "sum:assign:1", "sum:swap:1",
                       "sum:+1:1", "sum:-1:1", "color:enum:1", "color:statement:1", "clear:statement:1"]:
            check(wanted in names, f"no {wanted}: {names}")
        # no mutants: the loop's test as an if, the constant `case`, the last return, the equivalent line
        check(sum(n.startswith("sum:condition") for n in names) == 2, names)
        check(sum(n.startswith("color:enum") for n in names) == 1, names)
        check(not any(n.startswith(("least:compare", "least:statement")) for n in names), names)
        check(sum(n.startswith("sum:statement") for n in names) == 1, names)
        out = mutate(root, "--list", entries="equivalent fsdpi_sum\n= zum\n\n", status=1)
        check("broken    equivalent: zum is in fsdpi_sum 0 times\n" in out, out)
        drawn = mutate(root, "--list", "--sample", "5")
        check(drawn.count("\n") == 5 and drawn == mutate(root, "--list", "--sample", "5"), drawn)
        check(drawn != mutate(root, "--list", "--sample", "5", "--seed", "2"), drawn)


LISTED = """# a comment
small.swapped fsdpi_least
- a < b ? a : b
+ a < b ? b : a

small.void fsdpi_clear
- list[--n] = 0;
+ list[--n] = 1;

small.nowhere fsdpi_least
- a > b
+ a

small.no_c fsdpi_sum
- return sum
+ return zum
"""


def test_mutants_run():
    """What tests see is caught; what they do not see lives; what they do not reach is told."""
    with tempfile.TemporaryDirectory() as root:
        out = mutate(root, entries=LISTED, status=1)
        for line in ["caught    small.swapped  by test_small (small.first)",
                     "caught    small.void  by test_small (small.second)",
                     "broken    small.nowhere: its text is in fsdpi_least 0 times",
                     "broken    small.no_c  src/core/small.h:12",
                     "caught    src/core/small.h:fsdpi_sum:assign:1  by test_small (small.second)",
                     "LIVED     src/core/small.h:fsdpi_sum:condition:2  1 of 1 tests  src/core/small.h:10: "
                     "without the condition n != 7",
                     "caught    src/core/small.h:fsdpi_clear:statement:1  by test_small (small.second): hang",
                     "UNREACHED src/core/small.h:fsdpi_color:enum:1",
                     "left out: test_broken (small.first): it fails without"]:
            check(line in out, f"{line}: {out}")
        only = mutate(root, "--only", "src/core/small.h:fsdpi_sum:assign:1", "--least", "1", entries=LISTED, status=1)
        check("1 mutants in" in only and "1 caught, 0 lived" in only and "built" not in only, only)
        mutate(root, "--only", "small.void", entries=LISTED[:LISTED.index("small.nowhere")])
        mutate(root, "--function", "fsdpi_sum", "--least", "0.5")
        mutate(root, "--function", "fsdpi_color", "--least", "0.5", status=1)



if __name__ == "__main__":
    run("tools", globals())
