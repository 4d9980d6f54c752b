# SPDX-License-Identifier: MIT
"""cc_once.py - cc_once.py CACHE CC ARGUMENTS is CC ARGUMENTS, but compiles the same text with the same
options only once. Tests of packages compile the library from many folders. What differs is where its
parts are found and which flags a program gets: the preprocessor and the linker run each time. The
object comes from CACHE if preprocessed text and options are those of an earlier call. Debug
information is left out."""
import hashlib
import os
import subprocess
import sys

WITH_VALUE = ("-o", "-D", "-I", "-L", "-l", "-MF", "-MT", "-MQ", "-U", "-include", "-isystem")
NOT_ONE_OBJECT = {"-E", "-M", "-MM", "-S", "-fsyntax-only", "-x"}
OF_LINKER = ("-l", "-L", "-Wl,")
OF_PREPROCESSOR = ("-D", "-I", "-M", "-U", "-W", "-i", "-pthread")


def main(cache, compiler, *args):
    compile_it, options, link, sources, out = [], [], [], [], None
    words = iter(args)
    for word in words:
        pair = [word, next(words)] if word in WITH_VALUE else [word]
        if word == "-o":
            out = pair[1]
        elif word.endswith((".c", ".cc")):
            sources.append(word)
            link.append(None)  # where its object stands
        elif word != "-c" and not word.startswith("-g"):
            link += pair
            if not word.startswith(OF_LINKER) and not word.endswith((".o", ".a", ".so")):
                compile_it += pair
                if not word.startswith(OF_PREPROCESSOR):
                    options += pair
    if len(sources) != 1 or not out or NOT_ONE_OBJECT & set(args):
        os.execvp(compiler, [compiler, *args])
    text = subprocess.run([compiler, *compile_it, "-E", "-P", sources[0]], stdout=subprocess.PIPE, check=True)
    levels = [word for word in options if word.startswith("-O")]
    options = [word for word in options if word not in levels] + [o for o in levels[-1:] if o != "-O0"]
    key = hashlib.sha256(repr((compiler, options)).encode() + text.stdout).hexdigest()
    made = f"{cache}/{key}.o"
    if not os.path.exists(made):
        dependencies = [word for word in compile_it if word.startswith("-M")]
        subprocess.run([compiler, *compile_it, "-c", sources[0], "-o", f"{made}.{os.getpid()}"]
                       + (["-MF", "/dev/null"] if dependencies else []), check=True)
        os.rename(f"{made}.{os.getpid()}", made)
    if "-c" in args:
        os.execvp("cp", ["cp", made, out])
    os.execvp(compiler, [compiler, *(word or made for word in link), "-o", out])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as e:  # the compiler has said why
        sys.exit(e.returncode)
