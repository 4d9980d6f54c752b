#!/usr/bin/env python3
"""check_text.py - what can be checked by reading the sources; one check per call.

  toc        the files of src/core/ and src/base/: each is listed in docs/architecture.md, below
             those that it includes
  docs       every public function has a comment right above it with its name, with Result if it
             returns a status, and with Allocates if it makes an object
  functions  no function of a header or a backend is longer than 100 lines
  columns    no line is longer than 100 columns (a test: 120), ends in blanks or holds a tab
  code       every C block of the documents compiles as C99 and as C++11, and every block of C++ as
             C++17; whole programs also run
  commands   compile commands of documents and of first comments that are run in the root: their
             sources exist, and no folder has the name of what they write
  licence    fsdp.h ends with the text of LICENSE; every source file names the licence
  layers     each part begins with the include of its header, includes only parts below it, among
             them each part whose private names it uses, and is included; only headers and backends
             ask for FSDP_IMPLEMENTATION; there are no circles, neither of includes nor of calls of
             public functions; no file of src/core/ but src/core/backends.h names a backend
  port       only src/base/os.h and os_net.h use what only Linux has: /proc, system calls, flags of
             sockets. backends/fsdp_gloo.cc may: it drives Gloo's loop of epoll
  extensions no extension (fsdp_*.h and their parts) uses a private name of fsdp.h, src/core/ or
             backends/; only src/plan/, the upper floor of the core, uses those of src/core/. All
             use those of src/base/
  tests      each test that CONTRIBUTING.md, docs/parity.md or a command of a document names is in
             tests/; each row of a table there whose last column is "tests" names one; each test
             that is ported from PyTorch has a comment "PyTorch: FILE.py test_NAME. STATE: text.";
             docs/parity.md lists none of these as missing, and each rule of test_golden_events.c.
             With FSDP_RAN, which run_tests.sh sets: what is named or ported passed in that run,
             with all its rows. The numbers of recorded cases in documents are those that the tests
             expect
  pragmas    no pragma of a header stays in force after its include: pushes have pops, and what
             has none stands between FSDP_PRECISE_BEGIN and FSDP_PRECISE_END
  names      the library's names in docs/architecture.md exist, and the files
  callers    the first comment of a file in src/ has "Callers:"; each file that it names uses a name
             of this file; a function in parentheses is one, and the files before it, with only
             commas or "and" between, use it
  orders     a word of a struct in src/core/, of shm and of local ranks that is used by atomic
             operations names their memory orders at the start of its comment
  english    comments and documents say after, next to, eagerly, again, inside ... in place of the
             words in DIALECT: at most five of them stand in a file

In a document, ```cpp is a whole program of fsdp.hpp if it has a main(), else statements as below.
```c is a whole program if it has a main(), else statements, compiled inside a
function that knows the names in FRAGMENT. ```c file is compiled at file scope, a sketch is not.
A program is also an indented block with a main() in the first comment of a header.
"""
import fnmatch
import glob
import os
import re
import subprocess
import sys
import tempfile

def files_below(folder):
    """The files below a folder, also those whose names do not end as those of sources."""
    return sorted(os.path.join(where, name) for where, _, names in os.walk(folder)
                  for name in names if not name.endswith(".md"))


LIBTORCH = "fsdp_torch.h"  # in C++17: make torch compiles it
HEADERS = ["fsdp.h"] + sorted(set(glob.glob("fsdp_*.h")) - {LIBTORCH})
IN_CXX = glob.glob("fsdp*.hpp") + glob.glob(LIBTORCH)
PARTS = files_below("src/core") + files_below("src/base")
PLAN = sorted(set(files_below("src")) - set(PARTS))  # parts of extensions
DECLARES = HEADERS + glob.glob("src/core/extension.h")
BACKENDS = files_below("backends")
FOLDERS = ["bench", "cmake", "examples", "tests", "tools"]
TOC = "docs/architecture.md"
TESTS = "CONTRIBUTING.md"
MAX_FUNCTION = 100
MAX_COLUMNS = 100
PRIVATE = re.compile(r"\b(?:fsdpi|FSDPI)_\w+")
FRAGMENT = """
void layer_forward(float *y, const float *x, const float *w, const float *b);
void layer_backward(float *dx, const float *dy, const float *x, const float *w, float *dw,
                    float *db);
void my_init(void *user, const fsdp_param_view *rows);
int fragment(fsdp_world *world, fsdp_model *model, fsdp_unit *unit, fsdp_unit **h, fsdp_mesh *mesh,
             fsdp_adamw *opt, float **x, float **dx, float lr, int L, int step);
int fragment(fsdp_world *world, fsdp_model *model, fsdp_unit *unit, fsdp_unit **h, fsdp_mesh *mesh,
             fsdp_adamw *opt, float **x, float **dx, float lr, int L, int step) {
#line 1 "%s"
%s
    return 0;
}
"""


FRAGMENT_CPP = """
void layer_forward(float *y, const float *x, const float *w, const float *b);
void layer_backward(float *dx, const float *dy, const float *x, const float *w, float *dw,
                    float *db);
void fragment(fsdp::world &world, fsdp::model &model, fsdp::unit *h, fsdp::adamw &adamw, float **x,
              float **dx, double lr, int L);
void fragment(fsdp::world &world, fsdp::model &model, fsdp::unit *h, fsdp::adamw &adamw, float **x,
              float **dx, double lr, int L) {
#line 1 "%s"
%s
}
"""


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def lines_of(path):
    return read(path).split("\n")


STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*', re.S)


def code_of(path):
    """The text without comments."""
    keep = lambda m: m.group() if m.group().startswith('"') else " "
    return STRING_OR_COMMENT.sub(keep, read(path))


INCLUDE = re.compile(r'^[ \t]*#[ \t]*(include|import|include_next)\b[ \t]*(["<]?)([^">\n]*)', re.M)
OF_THE_SYSTEM = ("error.h", "float.h", "memory.h", "spawn.h")  # parts have these names, too


def includes(path):
    """The files of the project that a file includes, by their paths from the root, also those that
    only an option -I of a compiler would find."""
    folders = [os.path.dirname(path), "", "src", *sorted(glob.glob("src/*")), "backends"]
    found = []
    for _, sign, name in INCLUDE.findall(code_of(path)):
        places = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
        places = [place for place in places if os.path.isfile(place)]
        if sign and not (sign == "<" and name in OF_THE_SYSTEM):
            found += places[:1] or [name] * (sign == '"')
    return found


def check_toc():
    listed = re.findall(r"^ *(src/(?:core|base)/\w+\.h)  ", read(TOC), re.M)
    for path in sorted(set(PARTS) ^ set(listed)):
        yield f"{TOC}: the list of parts and the files of src/core/ and src/base/ differ in {path}"
    for i, path in enumerate(listed):
        for below in sorted(set(includes(path) if path in PARTS else []) & set(listed[i + 1:])):
            yield f"{TOC}: the list of parts has {path} above {below}, which it includes"


def declarations(lines):
    """Yields (index, text) of each FSDP_API declaration before the implementation."""
    for i, line in enumerate(lines):
        if re.match(r"#if.*FSDP\w*_IMPLEMENTATION", line):
            return
        if line.startswith("FSDP_API"):
            text = line
            while ";" not in text and "{" not in text:
                i += 1
                text += " " + lines[i].strip()
            yield i - text.count("\n"), text


def comment_above(lines, i):
    """The comment that ends right above line i, past other declarations of the same group."""
    while i > 0 and lines[i - 1].strip() and not lines[i - 1].rstrip().endswith("*/"):
        i -= 1
    end = i
    while i > 0 and lines[i - 1].strip():
        i -= 1
        if lines[i].startswith("/*"):
            return "\n".join(lines[i:end])
    return ""


# A field of a comment: its name first in a line or after two spaces, maybe with those of others.
FIELD = r"(?:^[ /*]*|  )(?:\w+, )*%s(?:, \w+)*[ \n]+"
SAYS = {"Result": r"[^\n]*(?:\bFSDP_OK|\b(?:as|see|status)\b)", "Allocates": r"(?!Result\b)\w"}


def check_docs():
    for path in DECLARES:
        lines = lines_of(path)
        starts = {}
        for i, line in enumerate(lines):
            if line.startswith("FSDP_API"):
                m = re.search(r"(\w+)\(", re.sub(r"__attribute__\(\(.*?\)\)", "", line))
                starts.setdefault(m.group(1) if m else "?", i)
        for _, text in declarations(lines):
            name = re.search(r"(\w+)\(", text).group(1)
            comment = comment_above(lines, starts[name])
            if not re.search(r"\b%s\b" % name, comment):
                yield f"{path}: {name}: no comment right above that has its name"
                continue
            fields = ["Result"] if "fsdp_status " in text.split(name)[0] else []
            if "FSDP_MUST_CHECK" in text and "**" in text:  # it makes an object
                fields.append("Allocates")
            missing = [f for f in fields if not re.search(FIELD % f + SAYS[f], comment, re.M)]
            if missing:
                yield f"{path}: {name}: no field {', '.join(missing)}"


def functions_of(path):
    """Yields (first line, number of lines) of each function, found by its braces."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())
    pattern = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|/\*.*?\*/|//[^\n]*'
    code = re.sub(pattern + r"|^[ \t]*#(?!\s*(?:if|el|endif))(?:[^\n]*\\\n)*[^\n]*", blank,
                  read(path).replace('extern "C"', "extern    "), flags=re.S | re.M)
    depth, branches, start, text = 0, [], None, ""  # text: of the declaration so far
    for i, line in enumerate(code.split("\n")):
        m = re.match(r"\s*#\s*(if|el|endif)", line)
        if m and m.group(1) == "if":
            branches.append(depth)
        elif m and branches:  # each branch begins at the depth of the first one
            depth = branches.pop() if m.group(1) == "el" else (branches.pop(), depth)[1]
            branches += [depth] if m.group(1) == "el" else []
        for c in "" if m else line:
            if depth == 0 and start is None and not c.isspace():
                start, text = i, ""
            if c == "{" and depth == 0 and re.fullmatch(r"\s*(extern|namespace\b.*?)\s*", text):
                start = None
                continue
            depth = max(0, depth + (c == "{") - (c == "}"))
            if depth == 0 and c == "}":
                if re.search(r"\)[^()=]*$", text) and "=" not in text:
                    yield start + 1, i - start + 1
                start = None
            elif depth == 0:
                text += c
                start = None if c == ";" else start


def check_functions():
    longest = (0, "")
    for path in HEADERS + IN_CXX + PARTS + PLAN + BACKENDS:
        for start, lines in functions_of(path):
            name = f"{path}:{start}"
            longest = max(longest, (lines, name))
            if lines > MAX_FUNCTION:
                yield f"{name}: a function of {lines} lines, at most {MAX_FUNCTION}"
    print(f"note: the longest function has {longest[0]} lines ({longest[1]})")


def scripts():
    """Programs of tools/ that are texts: their names have no dot."""
    for path in glob.glob("tools/*"):
        if "." not in path and os.path.isfile(path):
            with open(path, "rb") as f:
                if f.read(2) == b"#!":
                    yield path


def check_columns():
    sources = HEADERS + IN_CXX + PARTS + PLAN + BACKENDS + glob.glob("tests/*.[ch]")
    sources += glob.glob("tests/*/*.[ch]") + glob.glob("tests/*/*.cpp")
    sources += glob.glob("examples/*.cpp") + glob.glob("examples/gpt/*.cu")
    sources += glob.glob("tools/*.c") + glob.glob("tools/*.sh") + glob.glob("tools/*.py")
    sources += list(scripts()) + glob.glob("tests/tools/*.py")
    for path in sorted(sources):
        for i, line in enumerate(lines_of(path)):
            limit = MAX_COLUMNS + 20 * path.startswith("tests/")
            if len(line) > limit or line != line.rstrip() or "\t" in line:
                yield f"{path}:{i + 1}: {len(line)} columns, a tab or blanks at the end"


def blocks():
    """Yields (place, kind, text) of each C block, and of each one in C++, of kind cpp."""
    for path in ["README.md"] + sorted(glob.glob("docs/*.md") + glob.glob("backends/*.md")):
        if not os.path.exists(path):
            continue
        text = read(path)
        for m in re.finditer(r"^```c\b *(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S):
            kind = m.group(1) or ("program" if re.search(r"\bmain\(", m.group(2)) else "fragment")
            yield f"{path}:{text[: m.start()].count(chr(10)) + 2}", kind, m.group(2)
        for m in re.finditer(r"^```cpp *(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S):
            yield f"{path}:{text[: m.start()].count(chr(10)) + 2}", m.group(1) or "cpp", m.group(2)
    for path in HEADERS + IN_CXX:
        comment = "\n".join(lines_of(path)).split("*/")[0].split("\n")
        start = None
        for i, line in enumerate(comment + ["."]):
            if line.startswith(" " * 4):
                start = i if start is None else start
            elif line.strip() and start is not None:
                text = "\n".join(comment[start:i])
                if re.search(r"\bmain\(", text):
                    yield f"{path}:{start + 1}", "cpp" * (path in IN_CXX) or "program", text
                start = None


def run(command, **more):
    r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
                       stdin=subprocess.DEVNULL, universal_newlines=True, **more)
    return r.returncode, r.stdout


def check_runs(place, program):
    """The program ends with success, alone and on two ranks."""
    fsdprun = os.path.abspath("tools/fsdprun")
    for launcher in [[], [fsdprun, "-n", "2"]][: 1 + os.path.exists(fsdprun)]:
        status, out = run(launcher + [program], cwd=os.path.dirname(program))
        if status:
            yield f"{place}: {' '.join(launcher)} exit status {status}\n{out}"


def check_cpp(cxx, place, text, source, program):
    """A block of C++ compiles without a warning; a whole program runs."""
    whole = re.search(r"\bmain\(", text)
    path, line = place.split(":")
    if not whole:
        text = '#include "fsdp.hpp"\n' + (FRAGMENT_CPP % (path, text)).replace(
            "#line 1 ", f"#line {line} ")
    with open(source, "w", encoding="utf-8") as f:
        f.write(text)
    flags = "-x c++ -std=c++17 -O0 -Wall -Wextra -Wno-unused -Werror -I.".split()
    link = ["-o", program, source, "-pthread", "-lm"] if whole else ["-fsyntax-only", source]
    status, out = run(cxx + flags + link)
    if status:
        yield f"{place}: does not compile\n{out}"
    elif whole:
        yield from check_runs(place, program)


def check_code():
    cc, cxx = (os.environ.get("CC") or "cc").split(), (os.environ.get("CXX") or "c++").split()
    include = "".join(f'#include "{h}"\n' for h in HEADERS)
    count = {"program": 0, "fragment": 0, "file": 0, "sketch": 0, "cpp": 0}
    with tempfile.TemporaryDirectory() as tmp:
        for place, kind, text in blocks():
            count[kind] = count.get(kind, 0) + 1
            source, program = os.path.join(tmp, "block.c"), os.path.join(tmp, "block")
            path, line = place.split(":")
            if kind == "cpp":
                yield from check_cpp(cxx, place, text, source, program)
                continue
            if kind == "fragment":
                text = include + FRAGMENT % (path, text)
                text = text.replace("#line 1 ", f"#line {line} ")
            else:
                text = f'#line {line} "{path}"\n' + text
            if kind == "file" and "#include" not in text:
                text = include + text
            with open(source, "w", encoding="utf-8") as f:
                f.write("#include <math.h>\n#include <stdio.h>\n#include <stdlib.h>\n"
                        "#include <string.h>\n" + text if kind != "program" else text)
            flags = ["-std=c99", "-Wall", "-Wextra", "-Wno-unused", "-Werror", "-I."]
            if kind == "sketch":
                continue
            status, out = run(cxx + "-x c++ -std=c++11 -w -I. -fsyntax-only".split() + [source])
            if status:
                yield f"{place}: does not compile as C++\n{out}"
            if kind != "program":
                status, out = run(cc + flags + ["-fsyntax-only", source])
                if status:
                    yield f"{place}: does not compile\n{out}"
                continue
            status, out = run(cc + flags + ["-o", program, source, "-pthread", "-lm"])
            if status:
                yield f"{place}: does not compile\n{out}"
                continue
            yield from check_runs(place, program)
    print("note: " + ", ".join(f"{n} of kind {kind}" for kind, n in count.items()))
    if count["program"] == 0:
        yield "fsdp.h: the manual's program was not found"


def check_commands():
    paths = glob.glob("*.md") + glob.glob("docs/*.md") + glob.glob("backends/*.md")
    paths += HEADERS + IN_CXX
    paths += glob.glob("examples/*.md")
    paths += BACKENDS + glob.glob("examples/**/*.c*", recursive=True) + glob.glob("tools/*.c")
    made = {name for path in paths for name in re.findall(r"\bmkdir (\w+)", read(path))}
    count = 0
    for path in sorted(paths):
        for i, line in enumerate(lines_of(path)):
            m = re.search(r"\b(?:g?cc|[cg]\+\+|nvcc) -.* -o (\S+)", line)
            sources = re.findall(r"(?<=\s)\w+/\S+\.(?:cc|cpp|cu|c)\b", line) if m else []
            count += len(sources)
            for source in sources:
                if not os.path.exists(source):
                    yield f"{path}:{i + 1}: there is no {source}"
            if sources and (os.path.isdir(m.group(1)) or m.group(1) in made):
                yield f"{path}:{i + 1}: {m.group(1)} is a folder: choose another name behind -o"
    print(f"note: {count} sources in commands")


def sources_and(endings):
    """The sources of the library, and the files of FOLDERS with these endings."""
    return HEADERS + IN_CXX + PARTS + PLAN + BACKENDS + [
        os.path.join(where, name) for folder in FOLDERS for where, _, names in os.walk(folder)
        for name in names if re.search(rf"\.({endings})$", name)]


def check_licence():
    if not read("fsdp.h").endswith("\n/*\n" + read("LICENSE") + "*/\n"):
        yield "fsdp.h: its last comment is not the text of LICENSE"
    sources = sources_and(r"h|hpp|c|cc|cpp|cuh?|inc|inl|py|sh|cmake")
    sources += ["Makefile", "CMakeLists.txt", ".ci/run"]
    for path in sorted(s for s in sources if os.path.exists(s)):
        text = read(path)
        if "SPDX-License-Identifier: MIT" not in text:
            yield f"{path}: no line SPDX-License-Identifier: MIT in its first comment"
        for place in re.findall(r"full text at the end of ([\w ./]+)\)", text):
            if place != ("this file" if path == "fsdp.h" else "fsdp.h"):
                yield f"{path}: the full text of the licence is not at the end of {place}"


def front_of(path):
    """The public header whose part a file is: src/optim/muon_schedule.h is one of fsdp_muon.h."""
    room = room_of(path)
    own = f"fsdp_{re.split('[_.]', os.path.basename(path))[0]}.h"
    if room in ("base", "core", "backends"):
        return "fsdp.h"
    return own if own in HEADERS else f"fsdp_{room}.h"


def room_of(path):
    """The folder of a file, without those above it."""
    return os.path.basename(os.path.dirname(path))


def check_layers():
    parts = PARTS + PLAN + [p for p in BACKENDS if not re.search(r"_shim\.h$|\.c[cu]$", p)]
    below = {"core": ["core"], "backends": ["backends", "core"], "plan": ["plan", "core"],
             "checkpoint": ["checkpoint", "safetensors"]}
    uses = {path: set(includes(path)) - {front_of(path)} for path in parts}
    for path in parts:
        folder, front = room_of(path), front_of(path)
        way = "../" * path.count("/") + front
        ask = front[:-2].upper() + "_H"
        decides = path == "src/base/platform.h"  # whether there is an implementation
        if f'*/\n#ifndef {ask}\n#include "{way}"' not in read(path) and not decides:
            yield f"{path}: does not begin with #ifndef {ask}, #include \"{way}\", #endif"
        if folder != "backends" and "FSDP_IMPLEMENTATION" in code_of(path) and not decides:
            yield f"{path}: asks for FSDP_IMPLEMENTATION: {front} does so"
        allowed = ["base"] + below.get(folder, [folder])
        allowed += ["backends"] * (path == "src/core/backends.h")
        for used in sorted(uses[path]):
            if room_of(used) not in allowed:
                yield f"{path}: includes {used}, which is above it"
    known = set(HEADERS + parts + BACKENDS)
    for path in sorted(known):
        for used in includes(path):
            if os.path.exists(used) and used not in known:
                yield f"{path}: includes {used}, which no check reads"
        for kind, sign, name in INCLUDE.findall(code_of(path)):
            if kind != "include" or not sign:
                yield f"{path}: #{kind} {name}: only #include with the name of a file"
    included = {used for path in known for used in includes(path)}
    included.add("backends/fsdp_cuda_gemm.h")  # a program that has cuBLAS does
    for path in sorted(set(parts) - included):
        yield f"{path}: nothing includes it"
    for path in HEADERS[1:] + glob.glob("examples/**/*.[ch]*", recursive=True):
        for used in includes(path):
            if used in PARTS + PLAN and front_of(used) != path:
                yield f"{path}: includes {used}: include {front_of(used)}"
    yield from check_backends_named()
    yield from check_calls_go_down(uses)


def check_backends_named():
    named = re.findall(r"\bFSDP_BACKEND_(\w+)", code_of("src/core/backends.h"))
    names = sorted(set(named) | {"CUDA"})
    lower, upper = "|".join(names).lower(), "|".join(names)
    backend = rf"\b(?:fsdpi?_(?:{lower})_\w+|FSDP_BACKEND_(?:{upper}))\b"
    for path in sorted(set(PARTS) - {"src/core/backends.h", "src/core/backend.h"}):
        for name in sorted(set(re.findall(backend, code_of(path)))):
            yield f"{path}: names a backend: {name}"


def check_calls_go_down(uses):
    """No part stands on itself; no part calls a public function of one that stands on it."""
    reach = {}

    def beneath(path, seen=()):
        if path in seen:
            circle = " -> ".join(seen[seen.index(path):] + (path,))
            raise ValueError(f"{circle}: a circle of includes")
        if path not in reach:
            found = [{used} | beneath(used, seen + (path,)) for used in sorted(uses.get(path, ()))]
            reach[path] = set().union(*found)
        return reach[path]

    for path in sorted(uses):
        try:
            beneath(path)
        except ValueError as circle:
            yield str(circle)
            return
    yield from check_includes_itself(uses, reach)
    defined = re.compile(r"^FSDP_API [^;{]*?\b(fsdp_\w+)\([^;{]*\{", re.M)
    home = {name: path for path in uses for name in defined.findall(code_of(path))}
    for path in sorted(uses):
        for name in sorted(set(re.findall(r"\b(fsdp_\w+)\(", code_of(path)))):
            if path in beneath(home.get(name, "")):
                yield f"{path}: calls {name} of {home[name]}, which stands on it"


def check_includes_itself(uses, reach):
    """A part that uses a private name includes its home itself: of the parts that have the name,
    the one that all the others stand on."""
    users, pasted = {}, []
    for path in sorted(uses):
        for name in PRIVATE.findall(code_of(path)):
            users.setdefault(name, set()).add(path)
        pasted += [(path, begin) for begin in re.findall(r"\b(FSDPI_\w+_)##", code_of(path))]
    for name, paths in sorted(users.items()):
        paths |= {path for path, begin in pasted if name.startswith(begin)}
        for home in [p for p in paths if all(p in reach[q] for q in paths - {p})]:
            for path in sorted(p for p in paths - {home} if home not in uses[p]):
                yield f"{path}: uses {name}, and does not include {home} itself"


def check_extensions():
    owner = {}
    everyone = {name for path in PARTS if room_of(path) == "base"
                for name in PRIVATE.findall(code_of(path))}
    for path in PARTS + BACKENDS + ["fsdp.h"]:
        for name in PRIVATE.findall(code_of(path)):
            owner.setdefault(name, path)
    for path in HEADERS[1:] + IN_CXX + PLAN:
        for name in sorted(set(PRIVATE.findall(code_of(path))) & set(owner) - everyone):
            if room_of(path) == "plan" and owner[name] in PARTS:
                continue
            yield f"{path}: {name} is not its own, {owner[name]} has it: use public functions"


def check_pragmas():
    pragma = re.compile(r'#\s*pragma\s+(.+)|\b_Pragma\("(.*)"\)|'
                        r'\bFSDP_PRAGMA\((?!text)(.*?)\)(?=\s|$)')
    passes = re.compile(r"weak |GCC (unroll|ivdep)|clang loop ")  # for a name, for the next loop
    for path in HEADERS + IN_CXX + PARTS + PLAN + [p for p in BACKENDS if p.endswith(".h")]:
        pushed = dict.fromkeys(["FSDP_PRECISE"], 0)
        for i, line in enumerate(code_of(path).split("\n"), 1):
            change = re.match(r"FSDP_PRECISE_(BEGIN|END)\b", line)
            if change:
                pushed["FSDP_PRECISE"] += 1 if change.group(1) == "BEGIN" else -1
            for found in pragma.finditer(line):
                text = next(filter(None, found.groups()))
                # What clang does not pop on each target.
                text = text.replace("clang fp contract(off)", "contract push")
                text = text.replace("STDC FP_CONTRACT DEFAULT", "contract pop")
                change = re.search(r"\b(push|pop)(_|\b)", text)
                if change:
                    kind = re.sub(r"(push|pop)_|\W.*", "", text.replace("GCC ", "GCC_"))
                    pushed[kind] = pushed.get(kind, 0) + (1 if change.group(1) == "push" else -1)
                elif not passes.match(text) and not any(pushed.values()):
                    yield f"{path}:{i}: '{text}' stays in force after the header"
            for kind in [kind for kind in pushed if not 0 <= pushed[kind] <= 1]:
                yield f"{path}:{i}: '{kind}' is pushed twice, or popped without a push"
                pushed[kind] = 0
        for kind in [kind for kind in pushed if pushed[kind]]:
            yield f"{path}: '{kind}' is pushed and not popped"


def check_files_named(path):
    """The files and folders that a document names exist: from the root, from the document, or, as
    names without a folder, somewhere below src/ or backends/."""
    bare = {os.path.basename(p) for p in PARTS + PLAN + BACKENDS}
    name = (r"(?<![\w/.*-])(?:\.\./)?[\w.-]+(?:/[\w.-]+)*"
            r"(?:/|\.(?:h|c|cc|cu|md|py|sh|svg|csv))(?![\w/*])")
    for number, line in enumerate(lines_of(path), 1):
        for found in re.findall(name, re.sub(r"https?://\S+", "", line)):
            there = [found, os.path.join(os.path.dirname(path), found)]
            if not any(map(os.path.exists, there)) and found not in bare:
                yield f"{path}:{number}: no such file: {found}"


def check_names():
    """Names of the library in docs/architecture.md exist; so do the words in capital letters of the
    picture, which are steps, pools, streams and marks."""
    code = "\n".join(code_of(path) for path in HEADERS + IN_CXX + PARTS + PLAN + BACKENDS)
    names = set(re.findall(r"\w+", code))
    words = set()
    for path in PARTS + ["fsdp.h"]:
        words |= set(re.findall(r"\b(?:X\(|FSDP_STREAM_|FSDPI_USE_)(\w+)", read(path)))
    for path in ["docs/architecture.md"]:
        yield from check_files_named(path)
        picture = False
        for number, line in enumerate(lines_of(path), 1):
            if line.startswith("```"):
                picture = not picture
            for name in re.findall(r"\b(?:fsdpi?|FSDPI?)_\w+", line):
                if name not in names and not name.endswith("_"):
                    yield f"{path}:{number}: no such name: {name}"
            if picture and path.endswith("architecture.md"):
                for word in re.findall(r"\b[A-Z][A-Z_]{2,}\b", line):
                    if word not in words:
                        yield f"{path}:{number}: no such step, pool, stream or mark: {word}"


def known_tests():
    """{name of a test: its program} of the sources; rows of TEST_P not told apart."""
    known = {}
    for path in sorted(glob.glob("tests/*/*.c") + glob.glob("tests/*/*.cpp")):
        for m in re.finditer(r"^TEST\w*\((\w+),\s*(\w+)", read(path), re.M):
            known[f"{m.group(1)}.{m.group(2)}"] = os.path.splitext(os.path.basename(path))[0]
    for path in glob.glob("tests/*/test_*.py"):
        text = read(path)
        suite = re.search(r'\brun\("(\w+)", globals\(\)', text)
        for name in re.findall(r"^def test_(\w+)", text, re.M) if suite else []:
            known[f"{suite.group(1)}.{name}"] = os.path.basename(path)[:-3]
    return known


def night_tests():
    """Names of tests that run by make nightly only."""
    for path in glob.glob("tests/*/*.c"):
        text = code_of(path)
        apart = re.search(r"^#define TAGS .*NO\(SHM", text, re.M)
        for m in re.finditer(r"^TEST\w*\((\w+),\s*(\w+)([^{]*)", text, re.M):
            if re.search(r"\bNIGHT\b" + r"|AT_NIGHT\((GLOO|STUB)\)" * bool(apart), m.group(3)):
                yield f"{m.group(1)}.{m.group(2)}"


def tables(path, last):
    """Yields (line number, cells) of each row of the tables whose last column has this heading."""
    lines, heading = lines_of(path), None
    for i, line in enumerate(lines):
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
        if i + 1 < len(lines) and lines[i + 1].startswith("|---"):
            heading = cells[-1:]
        elif line.startswith("|") and not line.startswith("|---") and heading == [last]:
            yield i + 1, cells


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def named_in_table():
    """Yields (place, name) of each program and test in a column "tests" of CONTRIBUTING.md."""
    for line, cells in tables(TESTS, "tests"):
        yield f"{TESTS}:{line}", ""  # a row has to name something
        for name in quoted(cells[-1]):
            if name != "make test":
                yield f"{TESTS}:{line}", name


EVENTS = "tests/core/test_golden_events.c"  # docs/parity.md lists its rules
STATES = ["Done", "Partly", "Differs", "Not applicable", "Own"]
PORTED = "test_(fully_shard_|replicate_(training|with_compiler)|dtensor_compile)"
PORT = re.compile(r"(?:none|(test_\w+\.py) (test_\w+(?:, test_\w+)*))\. "
                  r"([A-Z][a-z ]+)(?:: .+)?\.")


def ports():
    """Yields [place, match of PORT or None, our tests] for each comment "PyTorch: ...". It covers
    the tests that follow, up to a blank line or to the next such comment after a test."""
    for path in sorted(glob.glob("tests/*/*.c")):
        text, found, used = read(path), [], True
        mark = re.compile(r"^/\* PyTorch:(.*?)\*/|^TEST\w*\((\w+),\s*(\w+)|^$", re.M | re.S)
        for m in mark.finditer(text):
            if m.group(2):
                used = True
                for port in found:
                    port[2].append(f"{m.group(2)}.{m.group(3)}")
                continue
            if used or m.group(1) is None:
                yield from found
                found, used = [], False
            if m.group(1) is not None:
                place = f"{path}:{text.count(chr(10), 0, m.start()) + 1}"
                found.append([place, PORT.fullmatch(" ".join(m.group(1).split())), []])
        yield from found


def named_in_ports(known):
    """Yields (place, name of one of our tests): below these comments, in them, or in parity.md."""
    texts = [(f"docs/parity.md:{i}", line) for i, line in enumerate(lines_of("docs/parity.md"), 1)]
    for place, form, ours in ports():
        yield from ((place, name) for name in ours)
        texts.append((place, form.group() if form else ""))
    suites = {name.split(".")[0] for name in known}
    for place, text in texts:
        for suite, name in re.findall(r"(?<![\w./])(\w+)\.(\w+)", text):
            if suite in suites:
                yield place, f"{suite}.{name}"


def complain_of_ports(known):
    """Checks the form of these comments, which tests need one, and what docs/parity.md lists."""
    covered, states = set(), {}
    for place, form, ours in ports():
        covered.update(ours)
        if not form:
            yield f"{place}: write: PyTorch: FILE.py test_NAME, ... (or: none). STATE: text."
            continue
        file, names, state = form.groups()
        if state not in STATES:
            yield f"{place}: {state} is no state: {', '.join(STATES)}"
        if not ours:
            yield f"{place}: no test follows this comment"
        if (state == "Own") != (not file):
            yield f"{place}: Own means that PyTorch has no such test: PyTorch: none. Own."
        for name in names.split(", ") if names else []:
            other = states.setdefault((file, name), (state, place))
            if other[0] != state:
                yield f"{place}: {name} is {state}, but {other[0]} at {other[1]}"
    for name, program in known.items():
        if re.match(PORTED, program) and name not in covered:
            yield f"{program}.c: no comment PyTorch: ... before {name}"
    file = ""
    for i, line in enumerate(lines_of("docs/parity.md"), 1):
        for name in quoted(line):
            file = name if re.fullmatch(r"test_\w+\.py", name) else file
            if (file, name) in states:
                yield f"docs/parity.md:{i}: {name} of {file} has a test: {states[file, name][1]}"


def named_in_commands():
    """Yields (place, pattern of tests) of each --filter= and FILTER= in a document."""
    for path in sorted(glob.glob("[RC]*.md") + glob.glob("docs/*.md")):
        for i, line in enumerate(lines_of(path)):
            for name in re.findall(r"\b(?:--filter|FILTER)=[\"']?([\w.*]+)", line):
                if name != "NAME" and "X" not in name:
                    yield f"{path}:{i + 1}", name


def check_counts():
    """The numbers of recorded cases in documents are those that their tests expect, and that the
    files have."""
    expected = {}
    for path in glob.glob("tests/core/test_golden_*.c"):
        for line in re.findall(r"^} files\[\] = (.*);|play_file\((.*), row\)", read(path), re.M):
            for name, cases in re.findall(r'"(\w+)(?:\.txt)?", (\d+)', "".join(line)):
                expected[name if "_" in name else f"train_{name}"] = int(cases)
    for name, cases in sorted(expected.items()):
        there = len(re.findall(r"^case ", read(f"tests/golden/{name}.txt"), re.M))
        if there != cases:
            yield f"tests/golden/{name}.txt: {there} cases, its test expects {cases}"
    sums = {kind: sum(n for name, n in expected.items() if name.startswith(kind))
            for kind in ("train", "events")}
    for path in ["README.md"] + sorted(glob.glob("docs/*.md")):
        text = read(path)
        told = [(m[1], sums["train"]) for m in re.finditer(
            r"\b(\d+)\s(?:recorded\s)?(?:trainings|training\sruns)\b", text)]
        told += [(m[1], sums["events"]) for m in re.finditer(r"\b(\d+)\srecorded\scases", text)]
        told += [(m[2], expected.get(m[1])) for m in re.finditer(
            r"`(?:[\w/]*/)?(\w+)\.txt` \((\d+) cases\)", text)]
        for number, wanted in told:
            if int(number) != wanted:
                yield f"{path}: {number} cases or trainings, their test expects {wanted}"


def matching(pattern, names):
    """As the harness: a glob if it has a star, else any name that has this text."""
    glob_ = pattern if "*" in pattern else f"*{pattern}*"
    return [n for n in names if fnmatch.fnmatchcase(n, glob_)]


def read_run(path):
    """{program: {test: {row: results}}} of a file that run_tests.sh wrote; most have one row."""
    ran = {}
    for line in read(path).splitlines():
        program, test, result = line.split("\t")
        rows = ran.setdefault(program, {}).setdefault(test.split("/")[0], {})
        rows.setdefault(test, set()).add(result)
    return ran


def check_tests():
    known, named, rows = known_tests(), [], {}
    programs = {os.path.basename(p).split(".")[0] for p in glob.glob("tests/*/test_*.*")}
    for place, name in named_in_table():
        rows.setdefault(place, 0)
        if not name:
            continue
        rows[place] += 1
        found = fnmatch.filter(sorted(programs if "." not in name else known), name)
        named += [(place, n) for n in found]
        if not found:
            yield f"{place}: no such test: {name}"
    for place, count in rows.items():
        if not count:
            yield f"{place}: a row that names no test"
    if not rows:
        yield f"{TESTS}: no table of tests"
    for place, name in named_in_ports(known):
        if name in known:
            named.append((place, name))
        else:
            yield f"{place}: no such test: {name}"
    yield from complain_of_ports(known)
    if os.path.exists(EVENTS):
        for rule in sorted(set(re.findall(r"\bRULE_(\w+)", read(EVENTS)))):
            if not re.search(rf"^- {rule}[: ]", read("docs/parity.md"), re.M):
                yield f"docs/parity.md: no item of the list for the rule {rule} of {EVENTS}"
    for place, pattern in named_in_commands():
        if not matching(pattern, known):
            yield f"{place}: no such test: {pattern}"
    yield from check_counts()
    if not os.environ.get("FSDP_RAN"):
        print(f"note: {len(set(named))} names of tests")
        return
    ran, night = read_run(os.environ["FSDP_RAN"]), set(night_tests())
    for place, name in sorted(set(named)):
        program, test = (known[name], name) if "." in name else (name, "*")
        if test in night:
            continue
        if re.match("test_(gloo|cluster)", program) and "gloo" in ran:  # no Gloo here, as it says
            continue
        tests = ran.get(program, {})
        rows = tests.get(test, {})
        if test == "*":  # a program ran if one of its tests did
            rows = {name: set().union(*(r for t in tests.values() for r in t.values()))}
        passes = any("OK" in results for results in rows.values())
        for row, results in (rows or {name: set()}).items():
            if passes and "SKIPPED" in results and place.startswith("tests/"):
                continue  # a row of a ported test that needs another backend, and says so
            if "OK" not in results:
                how = "failed" if results else "did not run"
                yield f"{place}: {row} {'was skipped' if 'SKIPPED' in results else how}"
    print(f"note: {len(set(named))} names of tests, all of which ran")


DIALECT = re.compile(
    r"(?<![\w`'./-])(?:behind|beside|by calls|so (?:many|long|often)(?! as\b| that\b)|anew|"
    r"inside of|an own|otherwise than|alike|seldom|in vain|mended)(?![\w`'(/-])")


DEFINED = re.compile(r"^[^\s#/].*?\b(fsdpi?_\w+)\(|^[ \t]*#[ \t]*(?:define|undef) (\w+)|"
                     r"^\}.*?(\w+);|^(?:typedef )?(?:struct|enum) (\w+) \{|"
                     r"^typedef .*?(\w+)[;(]", re.M)
FILE = r"[\w/]+\.(?:h|c|cc|cu)\b"


def callers_named(path):
    """Yields (name, file) of "Callers:": the file is said to use the name, None: any one. The file
    None: the name is this file's."""
    callers = re.search(r"\bCallers:\s(.*?)(?:\n\s*\n|\n +Source|\*/)", read(path), re.S)
    text = " ".join(callers.group(1).split()) if callers else ""
    yield from ((None, name) for name in re.findall(FILE, text))
    for files, names in re.findall(rf"((?:{FILE}(?:, | and | |))*)\(([^)]*)\)", text):
        for name in re.findall(r"\bfsdpi?_\w+", names):
            yield name, None
            yield from ((name, file) for file in re.findall(FILE, files))


def check_callers():
    words = lambda path: set(re.findall(r"\w+", code_of(path)))
    for path in PARTS + PLAN + BACKENDS:
        own = {name for names in DEFINED.findall(code_of(path)) for name in names if name}
        for constants in re.findall(r"\benum\b[^{;]*\{(.*?)\}", code_of(path), re.S):
            own.update(re.findall(r"\b[A-Z]\w+", constants))
        if path.startswith("src/") and not re.search(r"\bCallers:\s", read(path).split("*/")[0]):
            yield f"{path}: its first comment has no line Callers:"
        for name, file in callers_named(path):
            places = [os.path.join(folder, file or "")
                      for folder in (os.path.dirname(path), "src", "backends", "")]
            place = next(filter(os.path.isfile, places), None)
            if name and not file and name not in own:
                yield f"{path}: its comment says {name}, which it does not define"
            if file and not place:
                yield f"{path}: its callers name {file}, which does not exist"
            if place and not words(place) & ({name} if name else own):
                yield f"{path}: its comment says that {file} uses {name or 'a name of it'}"


def prose_of(path):
    """The comments of a source, or a document without code."""
    text = read(path)
    if path.endswith(".md"):
        return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    return "\n".join(m for m in STRING_OR_COMMENT.findall(text) if not m.startswith('"'))


def check_orders():
    """The orders of all accesses to a name are those of the declarations of that name."""
    used, said = {}, {}
    access = re.compile(r"\b(FSDPI_LOAD|FSDPI_STORE|__atomic_\w+)\(\(?(?:const \w+ \*\))?&?"
                        r"\w[\w()]*((?:\[[^][]*(?:\[[^][]*\])?[^][]*\]|->\w+|\.\w+)+)"
                        r"(?=((?:[^()]|\([^()]*\))*)\))")
    classes = {"RELAXED": "relaxed", "SEQ_CST": "seq_cst"}
    shared = [f"backends/fsdp_{what}.h" for what in ("comm", "gloo", "local", "shm_world",
                                                     "signature")]
    for path in sorted(glob.glob("src/core/*.h")) + shared:
        for kind, member, rest in access.findall(code_of(path)):
            name = re.findall(r"(?:->|\.)(\w+)", member)
            orders = re.findall(r"__ATOMIC_(\w+)", rest) if kind[0] == "_" else ["ACQUIRE"]
            if name:
                used.setdefault(name[-1], set()).update(classes.get(o, "release") for o in orders)
        for name, orders in re.findall(r"^ .*?(\w+)(?:\[\w+\])?; *// "
                                       r"\[((?:(?:relaxed|release|seq_cst)(?:, )?)+)\]",
                                       read(path), re.M):
            said.setdefault(name, set()).update(orders.split(", "))
    for name in sorted(set(used) | set(said)):
        if used.get(name) != said.get(name):
            yield (f"{name}: accesses are {', '.join(sorted(used.get(name, ['none'])))}, its "
                   f"declarations say {', '.join(sorted(said.get(name, ['nothing'])))}")


LINUX = re.compile(r"/proc/|/sys/fs|\bSYS_\w+|syscall\(|\b(?:memfd_create|prctl|epoll_\w+|eventfd|"
                   r"accept4|pipe2|fallocate|sched_\w+)\(|\b(?:SOCK_CLOEXEC|SOCK_NONBLOCK|F_OFD_"
                   r"\w+|MADV_\w+|FUTEX_\w+|sun_path)\b")


def check_port():
    for path in HEADERS + PARTS + PLAN + [p for p in BACKENDS if p.endswith(".h")]:
        found = LINUX.findall(code_of(path))
        if found and path not in ("src/base/os.h", "src/base/os_net.h"):
            yield f"{path}: {', '.join(found)}: move it to src/base/os.h or os_net.h"


def check_english():
    documents = glob.glob("*.md") + glob.glob("docs/*.md") + glob.glob("backends/*.md")
    for path in sorted(set(sources_and(r"h|c|cc|cpp|cu|md") + documents) - {"CHANGELOG.md"}):
        found = DIALECT.findall(prose_of(path))
        if len(found) > 5:
            yield f"{path}: {', '.join(found)}: use the words that everybody uses"


def main():
    problems = list(globals()["check_" + sys.argv[1]]())
    print("\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
