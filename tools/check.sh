#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# check.sh - the gates of `make check`, which check the sources, not a run of the tests.
#
#   tools/check.sh --list ci|nightly [NAME...]   gates whose names begin so, with ci those of both;
#                                                none: all of ci, or of nightly; a name of no gate
#                                                stays in the list, and fails
#   tools/check.sh --one NAME                    one gate, in GoogleTest's lines
#
# `nightly` are those that `ci` leaves out. A gate is a function gate_KIND; its name is KIND and the
# function's arguments, joined by dots. It passes by exit status 0, is skipped by 77 (its last line
# is the reason), and otherwise fails: then its output is shown. Flags come from the Makefile, and
# tools/run_tests.sh runs several gates at a time: use `make check`.
set -uo pipefail
build=${FSDP_BUILD:-build} work=${FSDP_BUILD:-build}/check
limit=900 # seconds for one gate; 3600 where a machine is emulated, next to other gates
headers=(fsdp.h)
for h in fsdp_*.h; do [ -e "$h" ] && [ "$h" != fsdp_torch.h ] && headers+=("$h"); done # in C

# ---- helpers ------------------------------------------------------------------------------------

skip() { echo "$*" && exit 77; }
die() { echo "$*" && exit 1; }
need() { # PROGRAM [PACKAGE]
    command -v "$1" >/dev/null || skip "no $1: install ${2:-$1}"
}

# The include lines of the given headers.
include() { printf '#include "%s"\n' "$@"; }
implement() { echo '#define FSDP_IMPLEMENTATION' && include "${@:-${headers[@]}}"; }

# Compiles standard input: compile COMPILER STANDARD FLAG...; every warning is an error.
compile() {
    local cc=$1 std=$2 flags=()
    shift 2
    need "$cc"
    case $std in
    *++*) flags=(-x c++) ;;
    *) flags=(-x c -Wc++-compat $CWARN) ;;
    esac
    "$cc" -std="$std" $WARN "${flags[@]}" -Werror -I. "$@" - || die "failed: $cc -std=$std $*"
}

# ---- gates --------------------------------------------------------------------------------------

# Declarations of each header, and all implementations together: by gcc in C99 the gate `symbols`
# compiles these.
gate_matrix() { # COMPILER STANDARD
    local h
    for h in "${headers[@]}"; do include "$h" | compile "$@" -fsyntax-only; done
    [ "$1 $2" = 'gcc c99' ] || implement | compile "$@" -O0 -c -o /dev/null
}

gate_optimize() { implement | compile "$1" c99 "-$2" -c -o /dev/null; }

# Only one header, twice, and only its implementation, without the libc's extensions.
gate_alone() { # HEADER'S STEM
    { include "$1.h" "$1.h" && echo 'int main(void) { return 0; }'; } |
        compile gcc c99 -fsyntax-only
    { implement "$1.h" && include "$1.h"; } | compile g++ c++11 -fsyntax-only
    { implement "$1.h" && include "$1.h"; } | compile clang c99 -fsyntax-only
}

# Each part by itself: what it uses, it includes. With FSDP_IMPLEMENTATION it is the whole library:
# in `make check` for one part of each folder, at night for `every` one.
gate_parts() { # COMPILER STANDARD [every]
    local h flags folder=
    for h in src/*/*.h backends/*.h; do
        case $h in
        *nccl.h | *cuda.h | *cuda_gemm.h) flags='-Itests/stubs -DFSDP_BACKEND_NCCL' ;;
        *) flags= ;;
        esac
        [ "${3-}" ] ||
            include "$h" | compile "$1" "$2" $flags -Wno-unused-function -fsyntax-only
        [ "$2" = c99 ] && { [ "${3-}" ] || [ "${h%/*}" != "$folder" ]; } || continue
        folder=${h%/*}
        implement "$h" | compile "$1" "$2" $flags -fsyntax-only
    done
}

gate_reverse() {
    local i reversed=()
    for ((i = ${#headers[@]} - 1; i >= 0; i--)); do reversed+=("${headers[i]}"); done
    implement "${reversed[@]}" | compile gcc c99 -fsyntax-only
}

# The implementation last, after every header of the libc, in a strict and in an open mode.
gate_last() { # STANDARD
    {
        printf '#include <%s.h>\n' assert complex ctype errno fenv float inttypes iso646 limits \
            locale math setjmp signal stdarg stdbool stddef stdint stdio stdlib string tgmath time \
            wchar wctype pthread unistd fcntl poll sched semaphore dlfcn sys/types sys/mman \
            sys/socket sys/stat sys/time sys/wait netdb netinet/in arpa/inet
        include "${headers[@]}" && echo 'int main(void) { return 0; }' && implement
    } >"$work/last.$1.c"
    # tgmath.h makes macros of the names of math.h: a header must not mind
    compile gcc "$1" -o "$work/last.$1" -pthread -Wl,--no-as-needed -lm <"$work/last.$1.c" &&
        "$work/last.$1"
}

# One macro that cuts or selects something. Without code, only clang sees unused functions.
gate_option() { # MACRO
    implement | compile gcc c99 "-D$1" -fsyntax-only
    implement | compile g++ c++11 "-D$1" -fsyntax-only
    implement | compile clang c99 "-D$1" -fsyntax-only
}

use='long long use(void); long long use(void) { fsdp_range r; r.start = 0;
    return fsdp_shard_range(10, 4, 1, &r) ? -1 : (long long)r.start; }'

# Getters that know the type, in C++. A wrong one fails in finalize, and still returns memory.
typed='static int typed() {
    fsdp_world *w; fsdp_model *m; fsdp_unit *u;
    fsdp_param_desc p = fsdp_vec("w", 4);
    fsdp_unit_desc d = FSDP_ZERO;
    d.params = &p, d.num_params = 1;
    if (fsdp_init(NULL, &w) || fsdp_model_create(w, NULL, &m)) return 1;
    if (fsdp_fully_shard(m, &d, &u)) return 1;
    fsdp_pre_forward(u);
    int right = fsdp_data_as<float>(u, 0) == fsdp_data(u, 0);
    fsdp_post_forward(u), fsdp_pre_backward(u);
    right &= fsdp_grad_as<float>(u, 0) == fsdp_grad(u, 0);
    fsdp_post_backward(u);
    right &= !fsdp_finalize_backward(m) && fsdp_data_as<double>(u, 0) != nullptr;
    return !right || fsdp_finalize_backward(m) != FSDP_ERR_INVALID_ARG || fsdp_shutdown(w);
}'
# One program of a C implementation, a C user and a C++ user.
gate_units_mixed() {
    local dir=$work/mixed
    mkdir -p "$dir"
    implement | compile gcc c99 -c -o "$dir/impl.o"
    { include "${headers[@]}" && echo "$use"; } | compile gcc c99 -c -o "$dir/c.o"
    { include "${headers[@]}" && echo 'extern "C" long long use(void);' "$typed" &&
        echo 'int main() { fsdp_range r; return fsdp_shard_range(10, 4, 1, &r) || r.start != 3 ||
              use() != 3 || typed(); }'; } | compile g++ c++11 -c -o "$dir/cc.o"
    g++ -o "$dir/a.out" "$dir"/*.o -pthread -lm && "$dir/a.out"
}

# Two private copies in one program.
gate_units_static() {
    local dir=$work/static
    mkdir -p "$dir"
    { implement && echo "$use"; } | compile gcc c99 -DFSDP_STATIC -O0 -c -o "$dir/a.o"
    { implement && echo 'long long use(void); int main(void) { fsdp_range r;' &&
        echo 'return fsdp_shard_range(10, 4, 1, &r) || use() != 3; }'; } |
        compile gcc c99 -DFSDP_STATIC -O0 -c -o "$dir/b.o"
    gcc -o "$dir/a.out" "$dir"/*.o -pthread -lm && "$dir/a.out"
    ! nm -g --defined-only "$dir/a.o" | grep fsdp_ || die 'FSDP_STATIC exports symbols'
}

# Fails unless compiling standard input says one error and no more: refused TEXT COMPILER FLAG...
refused() {
    local text=$1 out
    shift
    out=$("$@" -Wall -Wextra -I. -fsyntax-only - 2>&1 | grep -E '(error|warning):') || true
    [[ $out == *"#error \"$text"* || $out == *" \"$text"* ]] && [ "$(wc -l <<<"$out")" = 1 ] ||
        die "'$*' does not refuse by one '#error $text':" "$out"
}

# Where the library does not run, one #error says so, and nothing else. zig's clang compiles it.
gate_platforms() { "platforms_$1"; } # refused, tcc, zig
platforms_refused() {
    local cc=('gcc -std=c99 -x c' 'g++ -std=c++11 -x c++' 'clang -std=c99 -x c') c define
    need clang
    for c in "${cc[@]}"; do
        for define in -D__APPLE__ -D_WIN32; do
            implement | refused 'fsdp.h runs on Linux' $c -U__linux__ $define
        done
        implement | refused 'fsdp.h needs gcc or clang' $c -U__GNUC__
        { printf '#include <stdint.h>\n#undef UINTPTR_MAX\n#define UINTPTR_MAX UINT32_MAX\n' &&
            implement; } | refused 'fsdp.h needs 64 bits' $c
    done
    for c in 387 both; do
        implement | refused 'floats are computed with more bits' gcc -mfpmath=$c -x c
        implement fsdp.h | refused 'floats are computed with more bits' gcc -mfpmath=$c \
            -DFSDP_MATH_ONLY -x c
    done
}
platforms_tcc() { # it stands for compilers without gcc's builtins
    local bad
    need tcc
    # it may not compile the declarations of a header of the C library
    implement | { ! tcc -I. -c -o "$work/tcc.o" - 2>&1; } | grep -c '#error' | grep -qx 1 ||
        die 'tcc is not refused by one #error'
    bad=$(implement fsdp.h fsdp_{dtensor,optim,replicate,safetensors}.h |
        tcc -Wall -DFSDP_MATH_ONLY -I. -c -o "$work/tcc.o" - 2>&1) && [ -z "$bad" ] ||
        die "tcc with FSDP_MATH_ONLY:" "$bad"
}
platforms_zig() {
    local try zig=
    for try in zig 'python3 -m ziglang' "$build/zig/bin/python -m ziglang"; do
        ! $try version >/dev/null 2>&1 || { zig=$try && break; }
    done
    [ "$zig" ] || skip 'no zig: make nightly, or pip install ziglang'
    export ZIG_GLOBAL_CACHE_DIR=$PWD/$work/zig
    implement | $zig cc -std=c99 $WARN -Werror -I. -O0 -c -o "$work/zig.o" -x c -
    $zig cc -std=c99 -O1 -I. -o "$work/zig.out" examples/01_hello.c -pthread -lm
    "$work/zig.out" | grep -q '^step 200 ' || die 'what zig cc compiled does not run'
}

# musl, as Alpine has it. Debian's musl-gcc sees no headers of the kernel; tests use some.
need_musl() { need musl-gcc musl-tools; }
kernel_headers="-idirafter /usr/include -idirafter /usr/include/$(uname -m)-linux-gnu"

# The library, as strict as for glibc, calls nothing that musl >= 1.2.4 lacks; the tools and the
# GPT compile; a static job of 4 ranks runs.
gate_musl() {
    local f bad dir=$work/musl
    need_musl
    mkdir -p "$dir"
    implement | compile musl-gcc c99 -DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO -DFSDP_BACKEND_FAKE \
        -O0 -c -o "$dir/lib.o"
    bad=$(nm -u "$dir/lib.o" | awk '$2 ~ /64$/ {print $2}')
    [ -z "$bad" ] || die "musl has no" $bad
    for f in examples/gpt/train_gpt.c tools/*.c; do
        echo "#include \"$f\"" | compile musl-gcc c99 -Wno-c++-compat -fsyntax-only
    done
    for f in examples/01_hello tools/fsdprun; do
        musl-gcc -std=c99 -O0 -I. -static -o "$dir/${f##*/}" "$f.c" -pthread -lm
    done
    "$dir/fsdprun" -n 4 "$dir/01_hello" | tee "$dir/log" | tail -n 3
    grep -q '^step 200 ' "$dir/log" || die "$(cat "$dir/log")"
}

# A program of tests by another compiler: test_by BUILD CC PREFIX PROGRAM. Its gate is one of
# several, the first of which builds the library.
test_by() {
    local of=$build/$1 t=$4
    mkdir -p "$of"
    flock "$of/lock" make -s --no-print-directory BUILD="$of" CC="$2" CFLAGS=-O1 "$of/tests/$t"
    FSDP_BUILD=$of $3 "$of/tests/$t" --tags=shm --timeout-mult=10 >"$of/$t.log" 2>&1 ||
        die "$t: $(grep -vE '^\[( RUN|       OK|===)' "$of/$t.log")"
    echo "note: $(grep -c '^\[       OK' "$of/$t.log") passed"
}
# All examples and tools link, all tests compile, and those of the list run. test_sim_store cannot
# link: musl has no swapcontext.
gate_musl_tests() { # PROGRAM, or `compile`
    local f
    need_musl
    if [ "$1" != compile ]; then
        test_by musl "musl-gcc $kernel_headers" '' "$1"
        return
    fi
    for f in examples/*.c tools/*.c; do
        musl-gcc -std=c99 -O0 -I. -o "$work/musl.out" "$f" -pthread -lm
    done
    for f in tests/*/test_*.c; do
        case $f in *nccl* | *cuda* | *gloo* | *stub* | *gpu_first* | *launches*) continue ;; esac
        echo "#include \"$f\"" | compile musl-gcc c99 -Wno-c++-compat -Itests \
            $kernel_headers -fsyntax-only
    done
}

# aarch64 has the bits of x86-64. Its entry of a flight record is fenced, and its checksums and
# roots are instructions; qemu-user runs them.
gate_aarch64() { # PROGRAM, or `code`
    local cc='aarch64-linux-gnu-gcc' code=$work/aarch64.s what
    need $cc gcc-aarch64-linux-gnu && need qemu-aarch64 qemu-user
    if [ "$1" != code ]; then
        test_by aarch64 "$cc -static" qemu-aarch64 "$1"
        return
    fi
    implement | compile $cc c99 -O2 -S -o "$code"
    awk '/^fsdpi_flight_begin:/ { on = 1 } /\.size/ { on = 0 } on' "$code" | grep -q 'dmb' ||
        die 'fsdpi_flight_begin has no fence'
    for what in crc32cx 'fsqrt.*4s' 'fsqrt.*2d'; do
        grep -q "$what" "$code" || die "no instruction $what"
    done
}

# Words that headers of other systems and libraries define as macros. Those of the second list take
# arguments, so that a name without ( is none.
odd_words='small far near huge hyper interface min max IN OUT OPTIONAL VOID CONST DELETE ERROR THIS
    TRUE FALSE BOOL TEXT pascal cdecl None Bool Status True False Always Success Complex OK ERR NBBY
    linux unix i386 sun mips arm vax sparc nil YES NO I B0 ECHO'
odd_calls='MIN MAX move clear erase timeout echo filter scroll raw refresh roundup howmany powerof2
    setbit clrbit isset isclr major minor makedev check verify require likely unlikely container_of'

# The whole library compiles after such macros. The headers of the system come before them.
gate_odd_macros() {
    local w
    {
        printf '#include <%s.h>\n' arpa/inet dirent errno fcntl ifaddrs limits math netinet/in \
            netinet/tcp poll pthread sched signal stdio stdlib string sys/eventfd sys/mman \
            sys/socket sys/stat sys/syscall sys/un sys/wait time unistd asm/socket
        [ "$(uname -m)" != x86_64 ] || include emmintrin.h
        for w in $odd_words; do printf '#undef %s\n#define %s @odd@\n' "$w" "$w"; done
        for w in $odd_calls; do printf '#undef %s\n#define %s(...) @odd@\n' "$w" "$w"; done
        implement
    } | compile gcc c99 $stub -DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO -DFSDP_BACKEND_FAKE \
        -fsyntax-only
}

# FSDP_MATH_ONLY: a header has pure functions, which call nothing but mem* and str*, and, next to
# them, what `calls` says; or it has none, and one #error says so.
gate_math_only() {
    local h c calls bad
    for h in "${headers[@]%.h}" backends/fsdp_host_gemm; do
        calls='_GLOBAL_OFFSET|__stack_chk|__cpu_model$' # data of the compiler's library
        case $h in
        fsdp_checkpoint | fsdp_compress | fsdp_muon | fsdp_plan | fsdp_trace)
            for c in 'gcc -std=c99 -x c' 'g++ -std=c++11 -x c++'; do
                for bad in include implement; do
                    $bad "$h.h" | refused "$h.h has no pure functions" $c -DFSDP_MATH_ONLY
                done
            done
            continue ;;
        fsdp_dtensor) calls+='|exp$' ;; # of losses
        fsdp_optim) calls+='|pow$' ;;
        esac
        include "$h.h" | compile gcc c99 -DFSDP_MATH_ONLY -fsyntax-only
        implement "$h.h" | compile gcc c99 -DFSDP_MATH_ONLY -O1 -c -o "$work/math.o"
        implement "$h.h" | compile g++ c++11 -DFSDP_MATH_ONLY -fsyntax-only
        implement "$h.h" | compile gcc c99 -U__linux__ -DFSDP_MATH_ONLY -fsyntax-only
        bad=$(nm -u "$work/math.o" | awk -v known="^(mem|str|$calls)" '$2 !~ known {print $2}')
        [ -z "$bad" ] || die "$h.h calls:" $bad
    done
    bad=$(implement fsdp.h | gcc -std=c99 -DFSDP_MATH_ONLY -I. -H -E -o /dev/null -x c - 2>&1 |
        awk '$1 !~ /^\.+$/ || $2 == "fsdp.h" { next }
             $2 ~ /(^|\/)src\/(core|base)\// { part = length($1); next } # a part of it
             length($1) <= part { part = 0 }
             length($1) == 2 || length($1) == part + 1 {
                 sub(/.*\//, "", $2)
                 if ($2 !~ /^(stdint|stddef|string)\.h$/) print $2
             }')
    [ -z "$bad" ] || die "includes more than stdint, stddef, string:" $bad
}

# Exported names begin with fsdp_, and nothing writable is global but what a thread owns, and the
# list of hooks of fsdp_on_commit, with that of traces.
gate_symbols() {
    local bad
    implement | compile gcc c99 -O0 -fno-pic -fno-pie -c -o "$work/impl.o"
    bad=$(nm -g --defined-only "$work/impl.o" | awk '$3 !~ /^fsdp_/ {print $3}')
    [ -z "$bad" ] || die "exported without the prefix:" $bad
    bad=$(objdump -t "$work/impl.o" |
        awk '/\.(data|bss)|\*COM\*/ && $NF !~ /^\.(data|bss)/ && !/\.data\.rel\.ro/ &&
             $NF !~ /^(fsdpi_commit_hooks|hook\.[0-9]+)$/ {print $NF}')
    [ -z "$bad" ] || die "writable globals:" $bad
}

milliseconds() { # COMMAND...
    local start
    start=$(date +%s%N)
    "$@" </dev/null >&2 || die "failed: $*"
    echo $((($(date +%s%N) - start) / 1000000))
}

# Tests, examples, benchmarks and tools are free of warnings too; harness and examples also in C++.
gate_warnings() { # COMPILER
    local f stub std=c99 sources of_stub CWARN="$CWARN -Wno-c++-compat"
    of_stub=" $(tools/variants.sh programs stub | tr '\n' ' ')"
    sources=$(existing tests/*.c tests/*/*.c examples/*.c bench/*.c tools/*.c)
    case $1 in *++) std=c++11 sources=$(existing tests/tools/*_harness.c examples/*.c) ;; esac
    for f in $sources; do
        stub='-Itests -Itests/stubs'
        [[ $of_stub != *" $(basename "$f" .c) "* ]] ||
            stub+=' -DFSDP_BACKEND_SHM -DFSDP_BACKEND_NCCL'
        echo "#include \"$f\"" | compile "$1" "$std" $stub -fsyntax-only
    done
}

# fsdp.h, src/core/ and src/base/, with the default backend: figures and their goals. A file, by
# whatever name, is one subject.
core_files() { find src/core $(existing src/base) -type f | sort; }
gate_budget() {
    local f n lines text parse empty built
    include fsdp.h >"$work/decl.c" && implement fsdp.h >"$work/core.c" && : >"$work/empty.c"
    lines=$(cat fsdp.h $(core_files) | wc -l)
    built=$(milliseconds gcc -std=c99 -O2 -I. -c -o "$work/core.o" "$work/core.c")
    text=$(size -A "$work/core.o" | awk '/^\.text/ {n += $2} END {print n}')
    parse=$(milliseconds gcc -std=c99 -I. -fsyntax-only "$work/decl.c")
    empty=$(milliseconds gcc -std=c99 -I. -fsyntax-only "$work/empty.c")
    echo "note: fsdp.h, src/core/ and src/base/: $lines lines (goal 10800)," \
        "$((text / 1024)) KB of .text (goal 168), declarations parsed in $((parse - empty)) ms" \
        "(goal 40), -O2 build in $built ms (goal 3000)"
    for f in $(core_files); do
        n=$(wc -l <"$f")
        [ "$n" -le 700 ] || die "$f has $n lines: at most 700, then it is two subjects"
    done
}

# Writes the headers that examples and tests include, with the one header in place of fsdp.h and
# src/core/.
single_folder() { # FOLDER
    need python3
    rm -rf "$1"
    python3 tools/amalgamate.py "$1"
}
# Only the one fsdp.h, then extensions next to it, in the ways to use them.
gate_single() {
    local dir=$PWD/$work/single alone=$PWD/$work/alone f
    single_folder "$dir"
    rm -rf "$alone" && mkdir -p "$alone"
    cp "$dir/fsdp.h" "$alone"
    pushd "$alone" >/dev/null
    for f in 'gcc c99' 'clang c17' 'g++ c++11' 'clang++ c++20'; do
        { include fsdp.h fsdp.h && implement fsdp.h; } | compile $f -fsyntax-only
    done
    for f in 'gcc c99' 'clang++ c++20'; do
        implement fsdp.h | compile $f -DFSDP_MATH_ONLY -fsyntax-only
        implement fsdp.h | compile $f -DFSDP_STATIC -fsyntax-only
    done
    { include fsdp.h && echo "$use"; } | compile gcc c99 -c -o use.o # its code is in another unit
    implement fsdp.h | compile g++ c++11 -c -o impl.o
    { include fsdp.h && echo 'long long use(void); int main(void) { return use() != 3; }'; } |
        compile gcc c99 -Wno-missing-prototypes -c -o main.o
    g++ -o units *.o -pthread -lm && ./units
    cp "$OLDPWD"/examples/0[17]_*.c "$dir/fsdp_optim.h" "$dir/fsdp_plan.h" .
    gcc -O0 01_hello.c -o hello -pthread -lm && ./hello
    gcc -O0 07_plan.c -o plan -pthread -lm && ./plan
    popd >/dev/null
    for f in "-DFSDP_BACKEND_GLOO" "-DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO" "-DFSDP_BACKEND_NCCL" \
        "-DFSDP_BACKEND_SHM -DFSDP_BACKEND_NCCL" "-DFSDP_BACKEND_FAKE" \
        "-DFSDP_NO_BACKEND -DFSDP_BACKEND_FAKE"; do
        implement | (cd "$dir" && compile gcc c99 $f -I"$OLDPWD/tests/stubs" -fsyntax-only)
    done
    for f in "-DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO" "-DFSDP_BACKEND_SHM -DFSDP_BACKEND_NCCL"; do
        implement | (cd "$dir" && compile g++ c++11 $f -I"$OLDPWD/tests/stubs" -fsyntax-only)
    done
    include fsdp.hpp | (cd "$dir" && compile g++ c++17 -fsyntax-only)
    g++ -x c++ -std=c++11 -Itests/stubs -fsyntax-only "$dir/backends/fsdp_cuda.cu"
}
# The one header comes first where the Makefile's flags look for fsdp.h.
gate_single_example() { # NAME
    local dir=$PWD/$work/single.$1 program=$work/single.$1/$1
    single_folder "$dir"
    gcc -std=c99 -O0 -I"$dir" -MMD -MF "$program.d" -o "$program" "examples/$1.c" -pthread -lm
    ! grep -qE ' src/' "$program.d" ||
        die "$1 was not compiled with the one header"
    "$program"
}
gate_single_tests() {
    local dir=$PWD/$work/single.tests of=$build/single_tests t
    local tests='test_features test_shard test_spawn'
    single_folder "$dir"
    make -s --no-print-directory BUILD="$of" CC="gcc -I$dir" $(printf "$of/tests/%s " $tests)
    ! grep -qE ' src/' "$of"/tests/*.d ||
        die 'a test was not compiled with the one header'
    for t in $tests; do
        "$of/tests/$t" --tags=shm >"$work/single.$t.log" 2>&1 ||
            die "$(grep -vE '^\[( RUN|       OK|===)' "$work/single.$t.log")"
    done
}

# fsdp.hpp, an implementation with it, and its tests, whose harness has casts of C; before C++17 one
# #error says so.
gate_hpp() { # COMPILER STANDARD
    { include fsdp.hpp fsdp.hpp && echo 'int main() { return fsdp::world().close(); }'; } |
        compile "$@" -Wold-style-cast -fsyntax-only
    compile "$@" -Wold-style-cast -fsyntax-only <examples/11_cpp.cpp
    compile "$@" -Itests -fsyntax-only <tests/extensions/test_hpp.cpp
    include fsdp.hpp | refused 'fsdp.hpp needs C++17' "$1" -std=c++14 -x c++
}

gate_text() { # CHECK of tools/check_text.py
    need python3
    python3 tools/check_text.py "$1"
}

gate_errors() { # ids of error texts, and the table of them
    need python3
    python3 tools/errors
}

gate_floors() { # no circle of includes, and the picture of them
    need python3
    python3 tools/floors
}

# The faults of tools/mutations.txt still fit the code. `make nightly` draws mutants and runs them.
gate_mutations() {
    need python3
    tools/mutate --list --sample 0
}

gate_report() { # the pictures of docs/performance.md
    need python3
    python3 tools/bench_report
}

need_gloo() {
    echo '#include <gloo/transport/tcp/device.h>' | g++ ${GLOO_HOME:+-I"$GLOO_HOME/include"} -E \
        -x c++ - >/dev/null 2>&1 || skip 'no libgloo-dev'
}

# The Gloo backend: its C++ part in every mode; its header alone and beside shm; what both export.
gate_gloo() { # COMPILER STANDARD
    local bad flags="${GLOO_HOME:+-isystem $GLOO_HOME/include}"
    need "$1" && need_gloo
    "$1" -std="$2" $WARN -Werror $flags -O2 -c -o "$work/gloo.$1.$2.o" \
        backends/fsdp_gloo.cc
    bad=$(nm -g --defined-only "$work/gloo.$1.$2.o" |
        awk '$2 != "W" && $2 != "V" && $2 != "u" && $3 !~ /^fsdp_gloo_/ {print $3}')
    [ -z "$bad" ] || die "exported without the prefix:" $bad
}
gate_gloo_header() {
    local bad
    implement | compile gcc c99 -DFSDP_BACKEND_GLOO -O0 -c -o "$work/gloo.o"
    bad=$(nm -g --defined-only "$work/gloo.o" | awk '$3 !~ /^fsdp_/ {print $3}')
    [ -z "$bad" ] || die "exported without the prefix:" $bad
    implement | compile g++ c++11 -DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO -fsyntax-only
    implement | compile clang c11 -DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO -fsyntax-only
}
# Other build systems, and the recipes of packaging/.
gate_package() { # NAME, a function of tests/tools/packages.py
    need python3
    python3 tests/tools/packages.py "$1"
}

# ---- CUDA and NCCL ----

stub='-DFSDP_BACKEND_NCCL -Itests/stubs'

# What find_nccl.sh says, for `value NAME`.
need_nccl() {
    found=$(tools/find_nccl.sh 2>/dev/null) || skip 'no CUDA or NCCL: tools/find_nccl.sh says why'
}
value() { sed -n "s/^$1 = //p" <<<"$found"; }
only_fsdp() { # OBJECT: nothing else is exported; nvcc puts a tag of the file into private names
    local bad
    bad=$(nm -g --defined-only "$1" |
        awk '$2 !~ /^[WVu]$/ && $3 !~ /^fsdp_/ && $3 !~ /_GLOBAL__N_/ {print $3}')
    [ -z "$bad" ] || die "exported without the prefix:" $bad
}
all_modes() { # FLAG...: in the oldest and the newest of each language, between the compilers
    local mode
    for mode in gcc.c99 clang.c17 g++.c++20 clang++.c++11; do
        implement | compile "${mode%%.*}" "${mode#*.}" "$@" -fsyntax-only
    done
}

# The backend against NCCL's declarations of a version, alone and beside the others.
gate_nccl_header() { # VERSION
    all_modes $stub -DFSDP_STUB_NCCL="$1"
    implement | compile gcc c99 $stub -DFSDP_STUB_NCCL="$1" -O0 -c -o "$work/nccl.$1.o"
    only_fsdp "$work/nccl.$1.o"
    implement | compile g++ c++11 $stub -DFSDP_STUB_NCCL="$1" -DFSDP_BACKEND_SHM \
        -DFSDP_BACKEND_GLOO -fsyntax-only
}
gate_nccl_real() {
    need_nccl
    all_modes -DFSDP_BACKEND_NCCL $(value NCCL_FLAGS) $(value CUDA_FLAGS)
}

# nvcc without its optimizers, which take most of its time.
nvcc() { # STANDARD FLAG...
    "$(value NVCC)" -std="$1" -arch=sm_90 -Xcicc -O0 -Xptxas -O0 -Werror all-warnings \
        -Xcompiler -Wall -I. "${@:2}"
}
gate_nvcc_gpt() { # STANDARD: the examples in CUDA, as nvcc's optimizers see them
    local name
    need_nccl
    for name in gpt llama; do
        "$(value NVCC)" -std="$1" -arch=sm_90 -I. -DFSDP_BACKEND_NCCL $(value NCCL_FLAGS) \
            $(value CUBLAS_FLAGS) -c -o "$work/$name.$1.o" examples/$name/train_$name.cu
    done
}
gate_nvcc() { # STANDARD: the kernels, for a program in C, which tells that there is no GPU
    local libs program=$work/nvcc.$1
    need_nccl
    libs="$(value NCCL_LIBS) $(value CUDA_LIBS) -lstdc++"
    nvcc "$1" -c -o "$program.o" backends/fsdp_cuda.cu
    only_fsdp "$program.o"
    gcc -std=c99 -I. -DFSDP_BACKEND_NCCL $(value NCCL_FLAGS) $(value CUDA_FLAGS) -o "$program" \
        examples/01_hello.c "$program.o" $libs -pthread -lm
    [ ! -e /dev/nvidiactl ] || return 0
    ! "$program" >"$program.log" 2>&1 || die 'no failure without a GPU'
    grep -q 'CUDA' "$program.log" || die "$(cat "$program.log")"
}
gate_nvcc_unit() { # STANDARD: everything in one .cu file
    need_nccl
    {
        implement && echo '__global__ void kernel(float *x) { x[threadIdx.x] = 0; }' &&
            echo 'int main() { return fsdp_cuda_device_ops()->size == 0; }'
    } >"$work/unit.$1.cu"
    nvcc "$1" -DFSDP_BACKEND_NCCL $(value NCCL_FLAGS) -c -o "$work/unit.$1.o" "$work/unit.$1.cu"
    g++ -o "$work/unit.$1" "$work/unit.$1.o" $(value NCCL_LIBS) $(value CUDA_LIBS) -pthread -lm
    "$work/unit.$1"
}

# A target of libFuzzer for FUZZ_SECONDS (600), with sanitizers, from seeds of golden data and what
# earlier runs have found. FUZZ_KEEP=1 keeps what this one has found, where it reaches more code.
gate_fuzz() { # NAME
    local dir=$work/fuzz.$1 library=tests/library.c known=tests/golden/fuzz/$1.hex
    need clang
    [ "$1" != store ] || library=
    rm -rf "$dir" && mkdir -p "$dir"/{seeds,corpus,least}
    clang -std=c99 -g -O1 -I. -Itests -fsanitize=fuzzer,address,undefined \
        -fno-sanitize-recover=all tests/*/"fuzz_$1.c" $library -o "$dir/fuzz" -pthread -lm
    FSDP_FUZZ_SEEDS=$dir/seeds "$dir/fuzz" -runs=1
    [ ! -e "$known" ] || tools/fuzz_corpus unpack "$known" "$dir/seeds"
    ASAN_OPTIONS=quarantine_size_mb=4 "$dir/fuzz" -max_len=8192 -close_fd_mask=3 \
        -artifact_prefix="$dir/" -max_total_time="${FUZZ_SECONDS:-600}" "$dir/corpus" "$dir/seeds"
    [ "${FUZZ_KEEP-}" ] || return 0
    "$dir/fuzz" -merge=1 -close_fd_mask=3 -max_len=1024 "$dir/least" "$dir/corpus" "$dir/seeds"
    tools/fuzz_corpus pack "$dir/least" "$known"
}

# What `make gpu-test` and `make gpu-bench` run, so that it is known to work where there is a GPU.
gate_gpu_scripts() {
    local gpu=$build/stub csv=$build/stub/bench_gpu.csv
    make -s --no-print-directory BUILD="$gpu" NCCL=stub cuda-trainers "$gpu/bench/bench_gpu" \
        "$gpu/tests/conformance" "$gpu/tests/test_gpu_first"
    FSDP_BUILD=$gpu tools/gpu_bench.sh --small
    awk -F, 'NR > 1 { n[$6]++; if (NF != 9 || !($5 > 0)) { print; bad = 1 } }
             END { exit bad || n["GB/s"] != 23 || n["us"] != 14 || n["bytes"] != 2 || n["ms"] != 3 }
            ' "$csv" || die "$csv is not as expected"
    # as on a machine with one GPU, where threads are no ranks
    FSDP_BUILD=$gpu FSDP_STUB_DEVICES=1 FSDP_GPUS=1 tools/gpu_test.sh first parity \
        ranks/conformance.W=2 faults/conformance.W=2 multi | tee "$work/gpu.log"
    tail -n 1 "$work/gpu.log" | grep -q ' 0 failed, 5 skipped, 0 left out' ||
        die 'a part failed, was skipped or left out'
    cmp <(tail -n 1 "$gpu/gpu_test/summary.txt") <(tail -n 1 "$work/gpu.log")
    ! FSDP_BUILD=$gpu tools/gpu_test.sh nothing || die 'an unknown part is no failure'
    FSDP_BUILD=$gpu FSDP_STUB_DEVICES=1 FSDP_GPUS=1 tools/gpu_goals.sh --small >"$work/goals.log"
    [ "$(grep -c '^holds .*\(copy.clipped\|PEER_LOST\)' "$work/goals.log")" = 2 ] &&
        [ "$(grep -c ', goal ' "$work/goals.log")" -ge 12 ] || die 'gpu_goals.sh is not as expected'
}
# The GPT learns the same on 1 rank, on 3 processes and on 3 threads.
gate_gpt() {
    local run=0 how
    for how in '--ranks 1' '--ranks 3' '--ranks 3 --threads'; do
        run=$((run + 1))
        examples/gpt/train_gpt $how --data fsdp.h --steps 8 --layers 2 --heads 2 --channels 32 \
            --context 32 --batch 6 --sample 0 --csv "$work/gpt.$run.csv"
    done
    paste -d, "$work"/gpt.[123].csv | awk -F, 'NR > 1 {
        n++; worst = worst < $2 - $6 ? $2 - $6 : worst < $6 - $2 ? $6 - $2 : worst
        if ($6 != $10) { print "processes and threads differ: " $0; bad = 1 }
    }
    END { print "note: losses differ by " worst + 0; exit bad || n != 8 || worst > 1e-4 }'
}

# ---- their names --------------------------------------------------------------------------------

existing() { # FILE...: those that are there
    local f
    for f; do [ ! -e "$f" ] || echo "$f"; done
}

single_examples() { # DIGITS of their names
    existing examples/0["$1"]_*.c | sed 's|examples/\(.*\)\.c|single_example.\1|'
}

list() {
    printf 'text.%s\n' toc docs functions columns code commands licence layers port extensions \
        tests pragmas names callers orders english
    echo errors && echo floors && echo report && echo mutations && echo single
    single_examples 019
    printf 'warnings.%s\n' clang g++ # those of gcc fail the builds in .ci/run
    echo budget && echo symbols && echo math_only && echo odd_macros
    echo musl && printf 'platforms.%s\n' refused tcc
    echo reverse
    printf 'alone.%s\n' "${headers[@]%.h}"
    printf 'parts.%s\n' gcc.c99 g++.c++11
    printf 'last.%s\n' c99 gnu99
    printf 'units_%s\n' mixed static
    printf 'matrix.%s\n' gcc.c99 clang.c17 g++.c++11 clang++.c++20
    printf 'option.%s\n' NDEBUG FSDP_BACKEND_SHM \
        $([ ! -e backends/fsdp_fake.h ] || echo FSDP_BACKEND_FAKE) \
        $(grep -oh '\<FSDP_NO_[A-Z_]*' "${headers[@]}" | sort -u)
    printf 'gloo.%s\n' g++.c++11 clang++.c++20
    [ ! -e tests/tools/packages.py ] || printf 'package.%s\n' meson spack
    printf 'hpp.%s\n' g++.c++17 clang++.c++20
    echo nccl_header.21800
    echo nccl_real
    [ ! -e examples/gpt/train_gpt.c ] || echo gpt
}
list_nightly() { # the rest of every language, compiler and version
    single_examples 2345678
    printf 'warnings.%s\n' gcc clang++
    echo parts.gcc.c99.every
    printf 'matrix.%s\n' gcc.{c11,c17,c2x} clang.{c99,c11,c2x} g++.c++{14,17,20} \
        clang++.c++{11,14,17}
    printf 'hpp.%s\n' g++.c++20 clang++.c++17
    printf 'optimize.%s\n' {gcc,clang}.{O2,O3,Os}
    printf 'gloo.%s\n' g++.c++{17,20} clang++.c++{11,17}
    printf 'nccl_header.%s\n' 22304 22703 22809 23003 23102
    printf 'nvcc.%s\n' c++{11,20}
    printf 'nvcc_gpt.%s\n' c++{14,17}
    echo single_tests && echo platforms.zig
    printf 'musl_tests.%s\n' compile test_{bits,checkpoint,faults,golden_train,launch,memory,mesh} \
        test_{muon,optim,process,shard,spawn,store,trace} conformance
    printf 'aarch64.%s\n' code test_{bits,checkpoint,golden_train,muon,muon_values,optim} \
        test_safetensors conformance
    printf 'package.%s\n' conan vcpkg
    echo gpu_scripts
    echo gloo_header && echo nvcc_unit.c++17
    printf 'fuzz.%s\n' api checkpoint plan safetensors store
}

# ---- one gate ------------------------------------------------------------------------------------

one() { # NAME
    local start out status result
    start=$(date +%s%N)
    [[ $1 != aarch64.* ]] || limit=3600
    out=$(timeout -k 5 "$limit" "$0" --body "$1" 2>&1 </dev/null)
    status=$?
    result="$1 ($((($(date +%s%N) - start) / 1000000)) ms)"
    case $status in
    0) result="[       OK ] $result" && out=$(grep '^note: ' <<<"$out") ;;
    77) result="[  SKIPPED ] $1 (${out##*$'\n'})" && out='' ;;
    124 | 137) result="[  FAILED  ] $result" && out+=$'\n'"timed out after $limit s" ;;
    *) result="[  FAILED  ] $result" && out+=$'\n'"$1: exit code $status" ;;
    esac
    printf '[ RUN      ] check.%s\n%s%s\n' "$1" "${out:+$out$'\n'}" "${result/] $1/] check.$1}"
}

mkdir -p "$work"
unset MAKEFLAGS MFLAGS MAKELEVEL
case ${1-} in
--list)
    { if [ "$2" = ci ]; then list; fi
      if [ "$2" = nightly ] || [ $# -gt 2 ]; then list_nightly; fi; } |
        awk -v wanted="${*:3}" 'BEGIN { n = split(wanted, w, " ") }
            { hit = !n; for (i in w) if (index($0, w[i]) == 1) hit = known[i] = 1 } hit
            END { for (i in w) if (!known[i]) print w[i] } # a name of no gate fails as one' ;;
--one) one "$2" ;;
--body)
    : "${WARN:?run this by: make check GATES=...}"
    set -e
    IFS=. read -r kind a b c <<<"$2"
    "gate_$kind" ${a:+"$a"} ${b:+"$b"} ${c:+"$c"} ;;
*) die 'usage: tools/check.sh --list ci|nightly [NAME...] | --one NAME' ;;
esac
