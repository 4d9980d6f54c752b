#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""amalgamate.py - write each header of the library as one file (make single).

  tools/amalgamate.py FOLDER [ROOT]

fsdp.h, each extension fsdp_*.h of ROOT and fsdp.hpp become one file each in FOLDER; they still
include fsdp.h, and fsdp.hpp the extensions. Each #include "..." becomes the text of that file,
once. What belongs to another backend than the default one, which src/core/backends.h defines, stays
an include: those files are written into FOLDER/backends, where they find what they use of src/core/
in the one header, or, if they are compiled alone (.cu), in their own text. All is taken from the
headers; no name of a part stands here.
"""
import argparse
import glob
import os
import re
import sys
import textwrap

NOTE = "// Written by tools/amalgamate.py from %s: change those files.\n"
LONG = 20  # lines behind a part, from which on a heading tells that the file around it goes on
CONTENTS = """CONTENTS
    This file is the manual, the declarations and the implementation, in parts of one subject each.
    A part begins with a line of signs around its name: search for "== src/base/dtype.h ==". All
    that a program calls is declared above the first one. Each part stands below those that it uses.
"""
END_OF_CONTENTS = """\
    Further backends are in the folder backends/ beside this file.
    Extensions (fsdp_optim.h) are one file each, beside this file, too.
"""
CORE = ("src/core/", "src/base/")  # in the one fsdp.h
# The first lines of a part.
TO_FRONT = re.compile(r'#ifndef \w+\n#include "(?:\.\./)+fsdp\w*\.h"[^\n]*\n#endif\n')
INCLUDED = re.compile(r"\bA part of \w+\.h(, which includes it)?\.")


def files_of(root, *patterns):
    """The files below the root that fit a pattern, by their paths from there."""
    found = [path for pattern in patterns
             for path in glob.glob(os.path.join(glob.escape(root), pattern))]
    return sorted(os.path.relpath(path, root) for path in found)


class Amalgamation:
    def __init__(self, root, whole="fsdp.h"):
        self.root = root
        self.parts = [whole]  # in the order of their includes; paths from the root
        self.titles = {}
        texts = map(self.read, files_of(root, "fsdp.h", "src/core/*.h"))
        self.default = re.search(r"^#define (FSDP_BACKEND_\w+) 1", "\n".join(texts), re.M).group(1)
        body = self.expand(whole, self.read(whole), [])
        note = NOTE % self.sources() if self.parts[1:] else ""  # without parts it is the same file
        self.text = note + (self.contents(body) if whole == "fsdp.h" else body)

    def read(self, part):
        with open(os.path.join(self.root, part), encoding="utf-8") as f:
            return f.read()

    def sources(self):
        folders = [os.path.dirname(part) + "/" for part in self.parts[1:]]
        return ", ".join(self.parts[:1] + list(dict.fromkeys(folders)))

    def expand(self, part, text, before):
        """The text with its includes replaced. What only a part's own guard is around comes before
        the part: to `before`."""
        out, conditions, mark = [], [], 0
        for line in text.splitlines(keepends=True):
            if re.match(r"#\s*if", line):
                conditions.append(line)
            elif re.match(r"#\s*endif", line):
                conditions.pop()
            include = re.match(r'#\s*include "([^"]+)"', line)
            if not include:
                out.append(line)
                continue
            found = self.find(part, include.group(1))
            if self.is_optional(conditions):
                out.append(line.replace(include.group(1), found))
                continue
            if "/" not in found and self.parts[0] != "fsdp.h":  # what an extension is beside
                out.append(line)
                continue
            if found.startswith(CORE) and self.parts[0] != "fsdp.h":  # it is in there
                continue
            if found in self.parts:
                continue
            self.parts.append(found)
            if len(conditions) == 1 and conditions[0].startswith("#ifndef FSDPI_"):
                before.append(self.with_heading(found))
                continue
            self.close(out, mark, part)
            out.append(self.with_heading(found))
            mark = len(out)
        self.close(out, mark, part)
        return "".join(out)

    def close(self, out, mark, part):
        """A heading for what has been added since the mark, the end of another part."""
        if mark and len(out) - mark >= LONG:
            out.insert(mark, self.heading(f"{part}, continued") + " */\n")

    def heading(self, name):
        return f"\n{f'/* ==== {name} ':=<95}"

    def is_optional(self, conditions):
        """Inside a condition of other backends than the default one?"""
        names = [set(re.findall(r"\bFSDP_BACKEND_\w+", c)) for c in conditions]
        return any(n and self.default not in n for n in names)

    def find(self, part, name):
        for folder in (os.path.dirname(part), ""):
            path = os.path.normpath(os.path.join(folder, name))
            if os.path.exists(os.path.join(self.root, path)):
                return path
        sys.exit(f"{part}: cannot find {name}, which it includes")

    def with_heading(self, part):
        """A part's text, below those that it uses; of its first comment what one file has to say
        once is left out."""
        text = self.read(part)
        if "/" not in part:  # an extension's declarations: what implements it is in its own file
            text = text.split("\n/* =====")[0] + "\n"
        comment, code = text.split("*/", 1)
        paragraphs = re.split(r"\n\s*\n", comment.strip()[2:].strip())
        title, *rest = [self.without_place(p) for p in paragraphs if "SPDX-" not in p]
        title = title.split(" - ", 1)[-1]
        self.titles[part] = " ".join(title.split()).split(":")[0]
        comment = "\n\n   ".join([title] + [p for p in rest if p])
        before = []
        front = TO_FRONT.search(code)
        if front and f'/{self.parts[0]}"' in front.group() or self.parts[0] != "fsdp.h":
            code = TO_FRONT.sub("", code)
        code = self.expand(part, code.lstrip("\n"), before)
        return f"{''.join(before)}{self.heading(part)}\n   {comment} */\n\n{code}\n"

    def without_place(self, paragraph):
        if not INCLUDED.search(paragraph):
            return paragraph.strip()
        text = " ".join(INCLUDED.sub("", paragraph).split())
        return textwrap.fill(text, 95).replace("\n", "\n   ")

    def contents(self, body):
        """The body with a table of contents of one file."""
        table = ""
        for part in sorted(self.parts[1:], key=lambda part: body.index(self.heading(part))):
            lines = textwrap.wrap(f"{part:<24} {self.titles[part]}", 95, subsequent_indent=" " * 25)
            table += "".join(f"    {line}\n" for line in lines)
        first = re.search(r"^A PROGRAM$", body, re.M).start()
        body = body[:first] + CONTENTS + table + END_OF_CONTENTS + "\n" + body[first:]
        return re.sub(r"\n{3,}", "\n\n", body)


def of_backend(root, path, done):
    """A file of backends/ next to the one header, which has what it includes of src/core/; a file
    that is compiled alone gets the text, once."""
    with open(os.path.join(root, path), encoding="utf-8") as f:
        text = f.read()
    if path.startswith(CORE):
        text = TO_FRONT.sub("", text)

    def core(include):
        part = os.path.normpath(os.path.join(os.path.dirname(path), include.group(1)))
        if not part.startswith(CORE):
            return include.group()
        if part in done or path.startswith("backends/") and path.endswith(".h"):
            return ""
        done.append(part)
        return of_backend(root, part, done)
    return re.sub(r'#include "([^"]+)"[^\n]*\n', core, text)


def main():
    parser = argparse.ArgumentParser(description="Write each header of the library as one file. "
                                     "Backends but the default one stay files of their own.")
    parser.add_argument("folder", metavar="FOLDER", help="where to write them")
    parser.add_argument("root", nargs="?", default=os.path.join(os.path.dirname(__file__), ".."),
                        metavar="ROOT", help="the folder of fsdp.h; else the one above this tool")
    options = parser.parse_args()
    root, files = options.root, {}
    for name in files_of(root, "fsdp*.h", "fsdp*.hpp"):
        files[name] = Amalgamation(root, name).text
    for path in files_of(root, "backends/*.h", "backends/*.c[cu]"):
        files[path] = of_backend(root, path, [])
    os.makedirs(os.path.join(options.folder, "backends"), exist_ok=True)
    for path, text in files.items():
        with open(os.path.join(options.folder, path), "w", encoding="utf-8") as f:
            f.write(text)


if __name__ == "__main__":
    main()
