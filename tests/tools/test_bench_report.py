#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_bench_report.py - tools/bench_report: what is drawn, on small files; files as the benchmarks
write them; files that are none; the check of the committed pictures finds each difference."""
import csv
import os
import re
import runpy
import shutil
import sys
import tempfile
from xml.etree import ElementTree

from harness import Skip, check, python, run

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
TOOL = os.path.join(ROOT, "tools/bench_report")
PROGRAM = runpy.run_path(TOOL)  # its functions, for many small pictures
HEAD = """# title: a < b
# axis: us, median
# machine: 2 cores
# date: 2026-11-23
# commit: 0123abc
# state: busy: load 3
# command: build/bench/it
# better: lower
# spread: the range of runs
"""
NAMES = "panel,row,series,value,low,high,goal\n"


def draw(text, name="it.csv"):
    """(exit status, standard error, picture), as the program would have them"""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        try:
            return 0, "", PROGRAM["make"](path)[1]
        except SystemExit as e:
            return 1, str(e), ""


def drawn(text):
    """{class: how many} of circles and bars, and all texts."""
    status, err, svg = draw(text)
    check(status == 0 and not err, err)
    tree, marks, texts = ElementTree.fromstring(svg), {}, []
    for e in tree.iter():
        name = e.tag.split("}")[1]
        if name == "text":
            texts.append(e.text or "")
        elif name in ("circle", "rect", "path") and (name == "path" or len(e)):
            key = f"{name} {e.get('class')}"
            marks[key] = marks.get(key, 0) + 1
    return marks, texts


def test_marks_and_goals():
    marks, texts = drawn(HEAD + NAMES + "p,r,s,1,0.9,1.2,1.1\np,q,s,1.2,1.2,1.2,1.1\n"
                         "p,t,s,,1,1.1,1.1\np,u,s,,1,1.2,1.1\np,v,s,,,,1.1\n"
                         "\"x, y\",w,s,5,5,5,\n")
    check(marks["circle s0"] == 2 and marks["circle s0 miss"] == 1, f"points {marks}")
    check(marks["rect s0"] == 1 and marks["rect s0 miss"] == 1, f"bars {marks}")
    check(marks["path s0"] == 1, f"spreads {marks}")
    check(marks["path goal"] == 5 + 1, f"goals of rows, and in the key {marks}")
    for text in ("a < b", "us, median; logarithmic axis", "busy machine",
                 "2026-11-23, commit 0123abc, busy: load 3; 2 cores", "build/bench/it",
                 "not measured", "goal 1.1", "x, y", "1 to 1.2", "the range of runs"):
        check(text in texts, f"no text '{text}': {texts}")


def test_higher_is_better():
    marks, _ = drawn(HEAD.replace("lower", "higher") + NAMES + "p,r,s,2,,,3\np,q,s,4,,,3\n"
                                                              "p,t,s,,2,4,3\n")
    check(marks["circle s0"] == 1 and marks["circle s0 miss"] == 1, f"{marks}")
    check(marks["rect s0 miss"] == 1, f"{marks}")


def test_spreads_everywhere_or_nowhere():
    both, one = "p,r,s,2,1.9,2.1,\np,q,s,3,2.9,3.1,\n", "p,r,s,2,1.9,2.1,\np,q,s,3,,,\n"
    marks, texts = drawn(HEAD + NAMES + both)
    check(marks["path s0"] == 2 and "the range of runs" in texts, f"{marks} {texts}")
    marks, texts = drawn(HEAD + NAMES + one)
    check("path s0" not in marks and "the range of runs" not in texts, f"{marks} {texts}")
    head = HEAD.replace("# spread: the range of runs\n", "")
    for rows, good in ((one, True), (both, False), ("p,r,s,,1,2,\n", False)):
        status, err, _ = draw(head + NAMES + rows)
        check(good if status == 0 else "no line '# spread: ...'" in err, f"{rows}: {status} {err}")


def test_spread_beyond_the_axis():
    """It does not make the axis longer than values need: there it ends in an arrow."""
    marks, texts = drawn(HEAD + NAMES + "p,r,s,2,0.001,2.1,\np,q,s,3,2.9,5000,\n")
    check(marks["path s0"] == 2 + 2 and "it goes on beyond the axis" in texts, f"{marks} {texts}")
    check("1,000" not in texts and "0.01" not in texts, f"ticks {texts}")
    check("r, s: 2 (0.001 to 2.1)" in draw(HEAD + NAMES + "p,r,s,2,0.001,2.1,\n")[2], "the title")


def test_words():
    """The note is told, times stand beside values; with a linear axis nothing is said of it."""
    head = HEAD + "# note: a pass is both ways\n# scale: linear\n"
    _, texts = drawn(head + NAMES.strip() + ",times\np,r,s,2,,,,7 beside 14 ms\np,q,s,3,,,,\n")
    for text in ("a pass is both ways", "2 (7 beside 14 ms)", "3", "us, median"):
        check(text in texts, f"no text '{text}': {texts}")
    _, texts = drawn(HEAD.replace("us, median", "word " * 60) + NAMES + "p,q,s,3,,,\n")
    check(max(len(t) for t in texts) < 120 and texts.count("quiet machine") == 0, f"{texts}")


def test_ticks_around_all_points():
    """No point and no goal lies left of the first tick or right of the last one."""
    for scale in ("log", "linear"):
        for values in ((22.7, 97, 290), (0.895, 1.18), (0.05, 445000), (5,), (99.9, 100.1), (7, 8)):
            rows = "".join(f"p,r{i},s,{x},,,{x}\n" for i, x in enumerate(values))
            _, _, svg = draw(f"{HEAD}# scale: {scale}\n{NAMES}{rows}")
            ticks = [float(x) for x in re.findall(r'class="grid" d="M([\d.]+) ', svg)]
            marks = [float(x) for x in re.findall(r'cx="([\d.]+)" cy="\d+" r="3.5" stroke', svg)]
            goals = [float(x) for x in re.findall(r'class="goal" d="M([\d.]+) ', svg)]
            check(len(ticks) >= 2 and len(marks) == len(values), f"{scale} {values}: {ticks}")
            for x in marks + goals[-len(values):]:
                check(ticks[0] - 0.1 <= x <= ticks[-1] + 0.1, f"{scale} {values}: {x} {ticks}")


def test_stack():
    head = HEAD.replace("busy: load 3", "count") + "# form: stack\n# reference: not cut\n"
    marks, texts = drawn(head + NAMES + ",1 rank,a,3000000,,,\n,1 rank,b,1000000,,,\n"
                                        ",2 ranks,a,1500000,,,\n,2 ranks,b,500000,,,\n")
    check(marks["rect s0 part"] == 2 and marks["rect s1 part"] == 2, f"{marks}")
    for text in ("a", "b", "1 rank", "2 ranks", "4.0 MB", "2.0 MB", "not cut: 4.0 MB",
                 "2026-11-23, commit 0123abc, a count that no load changes; 2 cores", "us, median"):
        check(text in texts, f"no text '{text}': {texts}")
    _, _, svg = draw(head + NAMES + ",1,a,3,,,\n,1,b,1,,,\n,2,a,2,,,\n")
    boxes = [[float(x) for x in m] for m in re.findall(
        r'part" x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', svg)]
    check(abs(boxes[0][1] - 3 * boxes[1][1]) < 0.3 and abs(boxes[2][1] - 2 * boxes[1][1]) < 0.3
          and abs(boxes[1][0] + boxes[1][1] - boxes[0][0]) < 0.2, f"{boxes}")


def test_dark_pages():
    """Each colour has one for dark pages, and the picture grows with its page."""
    _, _, svg = draw(HEAD + NAMES + "p,r,s,1,,,\n")
    light, dark = svg[:svg.index("</style>")].split("@media (prefers-color-scheme: dark) {")
    for rule in re.findall(r"^(\S+) {.*#", light, re.M):
        check(re.search(rf"^{re.escape(rule)} {{.*#", dark, re.M), f"{rule}: {dark}")
    check('viewBox="0 0 760 ' in svg, svg[:200])


def test_places():
    """On a logarithmic axis equal ratios are equally far, on a linear one equal differences."""
    rows = "p,a,s,10,,,\np,b,s,100,,,\np,c,s,1000,,,\n"
    for scale, ratio in (("", 1), ("# scale: log\n", 1), ("# scale: linear\n", 10)):
        _, _, svg = draw(HEAD + scale + NAMES + rows)
        a, b, c = (float(x) for x in re.findall(r'cx="([\d.]+)" cy="\d+" r="3.5" stroke', svg))
        check(abs((c - b) / (b - a) - ratio) < 0.02 * ratio, f"{scale}: {a} {b} {c}")
    _, texts = drawn(HEAD + NAMES + "p,a,s,-20,,,\np,b,s,0,,,\np,c,s,20,,,\n")
    check("-20" in texts and "0" in texts, f"a linear axis without being asked: {texts}")


def test_quiet():
    _, texts = drawn(HEAD.replace("busy: load 3", "quiet") + NAMES + "p,r,s,1,,,\n")
    check("quiet machine" in texts and "busy machine" not in texts, f"{texts}")


def test_what_benchmarks_write():
    known = (
        ("op,world,bytes,who,samples,us_min,us_median,us_p95,to_memcpy_or_tcp,ratio_p10,ratio_p90",
         "all_gather,2,65536,shm,9,1,2,3,1.1,1,1.2", ["all_gather, 2 ranks", "64 KiB"], 1),
        ("param_dtype,mode,world,call,min_ns,median_ns,p95_ns,instructions",
         "f32,inline,1024,forward,72.1,75.9,80.4,\nf32,inline,1024,data,5,6,7,",
         ["pre_forward + post_forward, inline", "1,024 ranks", "goal 80"], 1),
        ("op,world,bytes,backend,us_ours,us_torch,us_tcp,times_faster,goal,verdict,to_tcp",
         "all_gather,2,1048576,gloo,1,3,1,3,1.5,reached,1", ["1 MiB", "goal 1.5"], 1),
        ("model,case,world,lanes,pass_us,plain_pass_us,extra_us_per_unit",
         "gpt,tiny,2,0,10,5,1", ["gpt tiny, W=2, lanes 0", "a pass"], 3),
        ("model,case,world,lanes,pass_us,torch_pass_us,plain_us,torch_plain_us,extra_us,"
         "torch_extra_us", "gpt,tiny,2,0,10,50,5,6,1,9", ["fsdp.h", "PyTorch"], 6),
    )
    for names, lines, expected, points in known:
        marks, texts = drawn(f"{names}\n{lines}\n")
        check(sum(n for m, n in marks.items() if m.startswith("circle")) == points, f"{marks}")
        for text in [*expected, "?, commit ?, nothing is known about the run; ?"]:
            check(text in texts, f"no text '{text}': {texts}")
        _, texts = drawn(f"{HEAD}{names}\n{lines}\n")
        check("a < b" in texts and "busy machine" in texts, f"the lines above count: {texts}")


def test_columns_of_the_benchmarks():
    """What the reader needs is what the programs say that they write."""
    for path, names in (
            ("bench/bench_comm.c", "op,world,bytes,who,samples,us_min,us_median,us_p95,"),
            ("bench/bench_host.c", "param_dtype,mode,world,call,min_ns,median_ns,p95_ns"),
            ("bench/bench_step.c", "plain_pass_us"), ("bench/bench_step.c", "extra_us_per_unit"),
            ("bench/fsdp_step.py", '"torch_extra_us"'), ("bench/fsdp_step.py", '"plain_us"'),
            ("bench/compare_torch.py", '"us_torch", "us_tcp"'),
            ("bench/compare_torch.py", '"times_faster", "goal"')):
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            check(names in f.read(), f"{path} does not write {names}")


def test_files_that_are_none():
    row = "p,r,s,1,,,\n"
    for text, says in (
            (NAMES + row, "no line '# title: ...'"),
            (HEAD.replace("# state: busy: load 3\n", "") + NAMES + row, "no line '# state: ...'"),
            (HEAD.replace("busy: load 3", "busy") + NAMES + row, "state is 'busy'"),
            (HEAD.replace("busy: load 3", "calm") + NAMES + row, "state is 'calm'"),
            (HEAD.replace("2026-11-23", "today") + NAMES + row, "date is 'today'"),
            (HEAD.replace("lower", "less") + NAMES + row, "better is 'less'"),
            (HEAD + "# scale: cubic\n" + NAMES + row, "scale is 'cubic'"),
            (HEAD + "# picture: ../it.svg\n" + NAMES + row, "picture is '../it.svg'"),
            (HEAD + "# form: heap\n# reference: a\n" + NAMES + row, "form is 'heap'"),
            (HEAD + "# form: stack\n" + NAMES + row, "no line '# reference: ...'"),
            (HEAD + "# form: stack\n# reference: a\n" + NAMES + row + "p,q,s,,1,2,\n", "no value"),
            (HEAD + "panel,row,value\np,r,1\n", "line 10: the columns are panel,row,value"),
            (HEAD + NAMES + row + "p,r,s,x,,,\n", "line 12: could not convert"),
            (HEAD + "# scale: log\n" + NAMES + "p,r,s,0,,,\n", "a number is not above 0"),
            (HEAD + NAMES + "p,r,s,nan,,,\n", "line 11: a number that is not finite"),
            ("# title: t\nop,world,bytes,backend,us_torch,times_faster,goal\nx,2,4,shm,1,2,\n",
             "no line '# machine: ...'"),
            (HEAD + NAMES + "p,r\n", "line 11: not 7 values"),
            (HEAD + NAMES + "p,r,s,,,,2\n", "no value"), (HEAD + NAMES, "no value"),
            ("", "line 1: the columns are")):
        status, err, svg = draw(text)
        check(status == 1 and says in err and not svg, f"{says}: {err}")


def tree(folder):
    """A repository of three files of results, their pictures and the document that shows them."""
    for name in ("tools", "bench/results", "docs"):
        os.makedirs(os.path.join(folder, name))
    shutil.copy(TOOL, os.path.join(folder, "tools"))
    for name in ("a", "b", "c"):
        with open(os.path.join(folder, f"bench/results/{name}.csv"), "w", encoding="utf-8") as f:
            f.write(HEAD + NAMES + "p,r,s,1,,,2\n")
    with open(os.path.join(folder, "bench/results/d.csv"), "w", encoding="utf-8") as f:
        f.write(HEAD + "# picture: other.svg\n" + NAMES + "p,r,s,1,,,2\n")
    for name, text in (
            ("performance", "## A and B\n![A](bench_a.svg)\n### B\n![B](bench_b.svg)\n"
                            "## C\n![C](bench_c.svg)\n## E\n![D](other.svg)\n![E](e.svg)\n"),):
        with open(os.path.join(folder, f"docs/{name}.md"), "w", encoding="utf-8") as f:
            f.write(text)
    return in_tree(folder, "--write")


def in_tree(folder, *arguments):
    r = python(os.path.join(folder, "tools/bench_report"), *arguments)
    return r.returncode, r.stdout


def test_check_of_all_pictures():
    def edit(path, old, new):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        with open(path, "w", encoding="utf-8") as f:
            f.write(text.replace(old, new))

    breaks = (
        (lambda d: None, 0, ""),
        (lambda d: edit(f"{d}/bench/results/a.csv", "s,1,", "s,1.5,"), 1,
         "docs/bench_a.svg is not the picture of its csv: make bench-report"),
        (lambda d: edit(f"{d}/docs/bench_b.svg", "busy machine", "quiet machine"), 1,
         "docs/bench_b.svg is not the picture of its csv"),
        (lambda d: os.remove(f"{d}/docs/bench_a.svg"), 1, "docs/bench_a.svg is missing"),
        (lambda d: os.remove(f"{d}/bench/results/a.csv"), 1,
         "docs/bench_a.svg: no file of bench/results makes it"),
        (lambda d: edit(f"{d}/docs/performance.md", "![B](bench_b.svg)", ""), 1,
         "docs/performance.md does not show bench_b.svg"),
        (lambda d: edit(f"{d}/docs/performance.md", "![A]", "![X](bench_x.svg)![A]"), 1,
         "docs/performance.md shows bench_x.svg, which no file of bench/results makes"),
        (lambda d: edit(f"{d}/docs/performance.md", "![D](other.svg)", ""), 1,
         "docs/performance.md does not show other.svg"),
    )
    for change, status, says in breaks:
        with tempfile.TemporaryDirectory() as folder:
            wrote = tree(folder)
            check(wrote[0] == 0 and "docs/bench_a.svg: 1 of 1 values with a goal meet it"
                  in wrote[1], f"{wrote}")
            change(folder)
            found = in_tree(folder)
            check(found[0] == status and says in found[1] and bool(found[1]) == bool(says),
                  f"{says}: {found}")


def test_numbers_of_documents():
    """Each number in a table that has a CSV is one of it, rounded, unless the text says it has none."""
    page = """# Numbers

## In short

| subject | measured | machine |
|---|---|---|
| [a](#a-and-b) | 1.2 to 2 ms, 7 of 9 runs | quiet |
| the same | W = 7, 163 | quiet |
| [none](#none) | 99 | quiet |

## A and B

![A](bench_a.svg)

| goal | measured | other (no CSV) |
|---|---|---|
| at most 77 | 1.23, `99`, 64 KiB [0.7, 9] | 99 |
| more (no CSV; `x`) | 99 | 1 |

### Sub

| goal | 163 | 428 |
|---|---|---|
| at most 77 | 1,234 | 428 ms |

Two paragraphs, this one
with no value (no CSV):

| goal | ms |
|---|---|
| x | 99 |

Another.

| goal | ms |
|---|---|
| x | 1.23 |

## C
![C](bench_c.svg) ![B](bench_b.svg)
![D](other.svg)

## None

| goal | ms |
|---|---|
| x | 99 |
"""
    readme = """## What you gain

![Memory](docs/other.svg)

It takes 3.3 MB of 5 MB.

| | a | command |
|---|---|---|
| step | 163 ms | `python3 bench/it.py --x` |
| step | 428 ms | the same |
"""
    breaks = [(page, readme, "")]
    for old, new, wrong in (
            ("1.2 to 2", "1.3 to 2", "1.3"), ("1.2 to 2", "1.2 to 99", "99"), ("163 |", "164 |", "164"),
            ("1.23, `99`", "1.24, `99`", "1.24"), ("1.23, `99`", "1.23, 99", "99"), ("1,234", "1,235", "1,235"),
            ("| 428 ms", "| 828 ms", "828"), ("| x | 1.23", "| x | 1.25", "1.25")):
        breaks.append((page.replace(old, new, 1), readme, wrong))
    for old, new in (("163 ms", "168 ms"), ("428 ms", "828 ms"), ("3.3 MB", "3.4 MB"), ("5 MB", "6 MB")):
        breaks.append((page, readme.replace(old, new), new.split()[0]))
    csvs = {"a": HEAD.replace("build/bench/it", "python3 bench/it.py") + NAMES.replace("goal", "goal,times") +
            "p,r,s,1.234,,,2,163 beside 428 ms\np,q,s,1234,,,,\n",
            "d": HEAD + "# picture: other.svg\n# form: stack\n# reference: x\n" + NAMES +
            "p,r,s,2e6,,,\np,r,t,3e6,,,\np,q,s,3300000,,,\n"}
    with tempfile.TemporaryDirectory() as folder:
        tree(folder)
        for name, text in csvs.items():
            with open(f"{folder}/bench/results/{name}.csv", "w", encoding="utf-8") as f:
                f.write(text)
        in_tree(folder, "--write")
        for text, other, wrong in breaks:
            for name, content in (("docs/performance.md", text), ("README.md", other)):
                with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
                    f.write(content)
            status, out = in_tree(folder)
            check(status == bool(wrong) and out.count("\n") == bool(wrong), f"{wrong}: {out}")
            check(not wrong or f" {wrong} " in out and "is not in the csv of" in out, f"{wrong}: {out}")


def test_pictures_of_the_document():
    r = python(TOOL)
    check(r.returncode == 0 and not r.stdout, r.stdout)


def test_memory_is_the_trainers():
    """bench/results/memory.csv has what the trainer says now, for 1 and 4 ranks."""
    if not os.access(os.path.join(ROOT, "examples/gpt/train_gpt"), os.X_OK):
        raise Skip("no examples/gpt/train_gpt: make examples builds it")
    for name in [k for k in os.environ if k.startswith("FSDP_") or k in ("RANK", "WORLD_SIZE")]:
        del os.environ[name]
    sys.path.insert(0, os.path.join(ROOT, "bench"))
    import goals
    with open(os.path.join(ROOT, "bench/results/memory.csv"), encoding="utf-8") as f:
        points = list(csv.DictReader(line for line in f if not line.startswith("#")))
    for ranks, row in ((1, "1 rank"), (4, "4 ranks")):
        kept = {p["series"]: int(p["value"]) for p in points if p["row"] == row}
        check(kept == goals.memory_of(ranks), f"{row}: {kept}: python3 bench/goals.py --only memory")


if __name__ == "__main__":
    run("bench_report", globals())
