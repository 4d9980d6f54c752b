# SPDX-License-Identifier: MIT
"""harness.py - what tests in Python share: they print the lines of harness.h, one test after the
other, and end with its summary. A test is a function test_NAME that raises when something is wrong
and raises Skip, with the reason, when this machine cannot run it."""
import functools
import os
import subprocess
import sys
import tempfile
import time
import traceback


class Skip(Exception):
    pass


def check(condition, text="a condition does not hold"):
    if not condition:
        raise AssertionError(text)


def sh(command, **options):
    """Runs a shell command, which has to succeed; returns what it printed."""
    r = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, universal_newlines=True, **options)
    check(r.returncode == 0, f"$ {command}\n{r.stdout[-4000:]}exit status {r.returncode}")
    return r.stdout


@functools.lru_cache()
def compiled(text, name):
    return compile(text, name, "exec")


def python(path, *args, cwd=None, stderr=subprocess.STDOUT):
    """Runs a program in Python as subprocess.run does, in a copy of this process: an interpreter that
    starts and compiles the program takes ten times as long as most of what the tests ask of one."""
    with open(path, encoding="utf-8") as f:
        code = compiled(f.read(), os.path.basename(path))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.chdir(cwd or ".")
                os.dup2(out.fileno(), 1)
                os.dup2((out if stderr == subprocess.STDOUT else err).fileno(), 2)
                sys.argv, sys.path[0] = [path, *args], os.path.dirname(path)
                exec(code, {"__name__": "__main__", "__file__": path})  # pylint: disable=exec-used
                status = 0
            except SystemExit as e:
                status = e.code if isinstance(e.code, (int, bool, type(None))) else 1
                if status == 1 and e.code != 1:
                    print(e.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(int(status or 0))
        ended = os.waitpid(pid, 0)[1]
        status = os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else -os.WTERMSIG(ended)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([path, *args], status, *texts)


def one(name, test):
    """Runs a test and prints its lines; returns the word of its result."""
    print(f"[ RUN      ] {name}", flush=True)
    start = time.monotonic()
    try:
        test()
        word = "      OK"
    except Skip as reason:
        print(f"[  SKIPPED ] {name} ({reason})", flush=True)
        return " SKIPPED"
    except Exception as e:  # after any error the other tests still run
        print(f"{type(e).__name__}: {e}")
        word = " FAILED "
    print(f"[ {word} ] {name} ({1000 * (time.monotonic() - start):.0f} ms)", flush=True)
    return word


def run(suite, names):
    """Runs the functions test_* of a program's globals(), by name; ends it with the status. With
    FSDP_LONG in the environment it runs the functions long_* instead, as a suite of its own."""
    prefix = "long_" if os.environ.get("FSDP_LONG") else "test_"
    suite = "long_" + suite if prefix == "long_" else suite
    tests = sorted((n[5:], fn) for n, fn in names.items() if n.startswith(prefix))
    start = time.monotonic()
    print(f"[==========] Running {len(tests)} tests.", flush=True)
    results = [(f"{suite}.{name}", one(f"{suite}.{name}", fn)) for name, fn in tests]
    took = 1000 * (time.monotonic() - start)
    print(f"[==========] {len(tests)} tests ran. ({took:.0f} ms total)")
    print(f"[  PASSED  ] {sum(word == '      OK' for _, word in results)} tests.")
    for word in (" SKIPPED", " FAILED "):
        listed = [name for name, w in results if w == word]
        if listed:
            print(f"[ {word} ] {len(listed)} test{'s' * (len(listed) > 1)}, listed below:")
        for name in listed:
            print(f"[ {word} ] {name}")
    sys.exit(any(word == " FAILED " for _, word in results))
