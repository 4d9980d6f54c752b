#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_plan_svg.py - tools/plan_svg: the picture of docs/plan.md is that of the plan which
examples/07_plan.c makes, and the text there is its text; what is drawn, on a small text; texts that
are none."""
import os
import re
import subprocess
import tempfile
from xml.etree import ElementTree

from harness import Skip, check, python, run

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
EXAMPLE = os.path.join(ROOT, os.environ.get("FSDP_BUILD", "build"), "examples/07_plan")
CLEAN = {k: v for k, v in os.environ.items()
         if not k.startswith("FSDP_") and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
# Two units: in the eager step each gathers twice, with the plan both gather together, once.
TEXT = r"""fsdp plan 1
model 00 units 2 params 2 shards 2 replicas 1 mode MODE
kind 00 calls 9 forward 4
bytes 4 bound 4 eager 4
count gathers 4 1 reductions 2 1 replicas 0 0 ops 9 4
read gathers 4 2 reductions 2 2
unit 0 'a' gather 4 grad 4 reads both
unit 1 'it\'s b' gather 4 grad 4 reads both
slot 0 gather at 0 bytes 4
slot 1 gather at 4 bytes 4
slot 2 grad at 8 bytes 4
call 0 pre_forward 'a'
  gather 'a' 'it\'s b' why joined
  acquire 'a' slot 0
  acquire 'it\'s b' slot 1
  op 2 all_gather gather 'a' 'it\'s b' GATHER 1 4 f32 f32 shards slot 0 shards slot 1 comm g #00
  op 3 use gather 'a' COMPUTE 0 0 ? ? slot 0 none #00
call 1 post_forward 'a'
  keep 'a' why next use at call 6
call 2 pre_forward 'it\'s b'
  op 7 use gather 'it\'s b' COMPUTE 0 0 ? ? slot 1 none #00
call 3 post_forward 'it\'s b'
  keep 'it\'s b' why next use at call 4
call 4 pre_backward 'it\'s b'
call 5 post_backward 'it\'s b'
  collect 'it\'s b' why joined
  free 'it\'s b' why last use
  release 'it\'s b' slot 1 COMPUTE
call 6 pre_backward 'a'
call 7 post_backward 'a'
  reduce 'it\'s b' 'a' why joined
  free 'a' why last use
  op 14 reduce_scatter reduce 'it\'s b' 'a' REDUCE 1 4 f32 f32 slot 2 grads slot 2 grads comm g #00
  release 'a' slot 0 COMPUTE
call 8 finalize_backward
end 00
"""


def draw(text):
    """(exit status, standard error, picture)"""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.txt")
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        r = python(os.path.join(ROOT, "tools/plan_svg"), path, stderr=subprocess.PIPE)
    return r.returncode, r.stderr, r.stdout


def titles(mode):
    status, err, svg = draw(TEXT.replace("MODE", mode))
    check(status == 0 and not err, err)
    root = ElementTree.fromstring(svg)  # well-formed
    check(root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}", svg[:200])
    light, dark = svg[:svg.index("</style>")].split("@media (prefers-color-scheme: dark) {")
    for name in {e.get("class") for e in root.iter() if e.get("class")}:
        check(f".{name} {{" in light and f".{name} {{" in dark, f"no colour of {name}")
    check("if a collective is for several units, how many they are." in svg, "the number 2 is told")
    check("fill=" not in svg, "a colour that is the same on a dark page")
    check("it\\'s b is here" in svg or "it\\&apos;s b is here" in svg, svg)
    return re.findall(r">(By calls|From the plan): (\d+) gathers, (\d+) reductions, (\d+) units of "
                      r"time, at most (\d) of 2", svg)


def test_inline():
    # Four pieces of work, four gathers and two reductions; or one of each.
    check(titles("inline") == [("By calls", "4", "2", "10", "1"),
                               ("From the plan", "1", "1", "6", "2")], str(titles("inline")))


def test_streams():
    # Work waits for its inputs. The first reduction overlaps with the last piece of work.
    check(titles("streams") == [("By calls", "4", "2", "9", "1"),
                                ("From the plan", "1", "1", "6", "2")], str(titles("streams")))


def test_long_names():
    """Boxes begin right of the longest name."""
    name = "a_block_with_a_long_name"
    _, _, svg = draw(TEXT.replace("MODE", "inline").replace("'a'", f"'{name}'"))
    first = min(float(x) for x in re.findall(r'<rect class="\w+" x="(\d+)"', svg))
    check(first >= 8 + 7 * len(f"{name} is here"), f"{first}")


def test_not_what_is_counted():
    status, err, _ = draw(TEXT.replace("MODE", "inline").replace("gathers 4 1", "gathers 5 1"))
    check(status == 0 and "eager: 4 gathers are drawn, the text counts 5" in err, err)


def test_no_plan():
    for text, says in ((TEXT.replace("  op 2 all_gather", "  oops 2 all_gather"), "line 16 is none of"),
                       (TEXT.replace("count gathers", "count"), "line 5 is none of a plan"),
                       ("\n".join(line for line in TEXT.splitlines() if "op " not in line
                                  and "release" not in line), "without ops"), ("", "no plan")):
        status, err, svg = draw(text)
        check(status == 1 and says in err and not svg, f"{status} {err}")


def plan_of_the_example():
    if not os.access(EXAMPLE, os.X_OK):
        raise Skip("the example is not here: make examples builds it")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.txt")
        subprocess.run([EXAMPLE, path], check=True, stdout=subprocess.DEVNULL, env=CLEAN)
        with open(path, encoding="utf-8") as f:
            return f.read()


def test_text_of_the_document():
    """Line by line, in this order; ... stands for what is left out."""
    with open(os.path.join(ROOT, "docs/plan.md"), encoding="utf-8") as f:
        shown, = re.findall(r"^```\n(fsdp plan 1\n.*?)^```", f.read(), re.M | re.S)
    lines = iter(plan_of_the_example().splitlines())
    for wanted in shown.splitlines():
        pattern = re.escape(wanted).replace(re.escape("..."), ".*")
        check(wanted == "..." or any(re.fullmatch(pattern, line) for line in lines),
              f"docs/plan.md shows a line that is not in the plan, or not here: {wanted}")


def test_picture_of_the_document():
    status, err, svg = draw(plan_of_the_example())
    check(status == 0 and not err, err)
    with open(os.path.join(ROOT, "docs/plan.svg"), encoding="utf-8") as f:
        check(f.read() == svg, "docs/plan.svg is not the picture of this plan: make plan-svg")


if __name__ == "__main__":
    run("plan_svg", globals())
