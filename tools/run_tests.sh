#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run_tests.sh - run test programs and close with one total: "N passed, N failed, N skipped".
#
#   tools/run_tests.sh [--filter=PATTERN] PROGRAM... [VARIABLE=VALUE PROGRAM...] [skip:NAME:REASON]
#
# PROGRAM:PATTERN runs only those tests of it. A variable holds for the programs behind it. skip:
# counts one test that cannot run here.
# A program prints GoogleTest's lines (tests/harness.h does; tools/check.sh too); *.py is run by
# python3. Without a filter, tests whose suite begins with long_, and programs of faults, run after
# all others: side by side, as most of them wait, each shown as a whole, in their order. The exit
# status is 0 only if something ran and nothing failed.
set -fuo pipefail # names may hold globs
filter='' passed=0 failed=0 skipped=0 failures=()
case ${1-} in --filter=*) filter=${1#--filter=} && shift ;; esac
tmp=$(mktemp -d) && trap 'jobs -p | xargs -r kill; rm -rf "$tmp"' EXIT
log=$tmp/log

# Adds what a program printed: each RUN line is closed by the result line with its name.
count() { # PROGRAM STATUS
    local ok bad skip names name
    { read -r ok bad skip && read -r names; } < <(awk -v tag="$1" '
        function is(line) { return open != "" && (index(line, open " ") == 1 || line == open) }
        { rest = substr($0, 14) }
        /^\[ RUN      \] / { if (open == "") open = rest; next }
        /^\[       OK \] / && is(rest) { ok++; open = "" }
        /^\[  SKIPPED \] / && is(rest) { skip++; open = "" }
        /^\[  FAILED  \] / && is(rest) { bad++; names = names " " open; open = "" }
        END {
            if (open != "") { bad++; names = names " " open "(unfinished)" }
            print ok + 0, bad + 0, skip + 0; print names
        }' "$log")
    if [ "$bad" = 0 ] && [ "$2" != 0 ]; then bad=1 names="exit-status-$2"; fi
    if [ $((ok + bad + skip)) = 0 ]; then bad=1 names='ran-no-test'; fi
    passed=$((passed + ok)) failed=$((failed + bad)) skipped=$((skipped + skip))
    for name in $names; do failures+=("${1%% *}: $name"); done
}

run() { # PROGRAM [FILTER]
    local command=($1) status=0
    case $1 in
    *.py)
        if ! command -v python3 >/dev/null; then
            printf '[ RUN      ] %s\n[  SKIPPED ] %s (no python3)\n' "$1" "$1" | tee "$log"
            count "$1" 0
            return
        fi
        command=(python3 "$1") ;;
    *) [ -z "${2-}" ] || command+=("--filter=$2") ;;
    esac
    echo "== ${command[*]}"
    "${command[@]}" </dev/null 2>&1 | tee "$log"
    status=$?
    count "$1" "$status"
}

has() { # PROGRAM FILTER: any such test, or something to complain about
    local names
    names=$("$1" --list "--filter=$2" 2>&1) || return 0
    [ -n "$names" ]
}

is_harness() { case $1 in *.py | *.sh*) false ;; esac; }
late() { # PROGRAM: which of its tests run after all others
    case $1 in *_faults) echo '*' ;; *) echo 'long_*' ;; esac
}
variables=()
is_program() { # else a variable of those behind it, or the name of what cannot run
    case $1 in
    *.sh*) ;;
    skip:*) return 1 ;;
    [A-Z]*=*) export "${1?}" && variables+=("${1%%=*}") && return 1 ;;
    esac
}

for program; do
    if [[ $program == skip:* && -z $filter ]]; then
        IFS=: read -r _ name reason <<<"$program"
        printf '[ RUN      ] %s\n[  SKIPPED ] %s (%s)\n' "$name" "$name" "$reason"
        skipped=$((skipped + 1))
    elif ! is_program "$program"; then
        continue
    elif ! is_harness "$program"; then
        [ -n "$filter" ] || run "$program"
    else
        patterns=-$(late "$program")
        [[ $program != *:* ]] || patterns=${program#*:}:$patterns
        program=${program%%:*} patterns=${filter:-$patterns}
        ! has "$program" "$patterns" || run "$program" "$patterns"
    fi
done
[ ${#variables[@]} = 0 ] || unset "${variables[@]}"

# ---- those that run late ------------------------------------------------------------------------

waiting=() started=0 # "PID NUMBER COMMAND", in the order of their start; it prints to $tmp/NUMBER
close_oldest() {
    local pid number command status
    read -r pid number command <<<"${waiting[0]}"
    waiting=("${waiting[@]:1}")
    wait "$pid"
    status=$?
    log=$tmp/$number
    echo "== $command"
    cat "$log"
    count "${command%% *}" "$status"
}
for program; do
    is_program "$program" || continue
    [[ $program != *:* ]] || continue
    patterns=$(late "$program")
    [ -z "$filter" ] && is_harness "$program" && [ -x "$program" ] && has "$program" "$patterns" ||
        continue
    [ ${#waiting[@]} -le "$(nproc)" ] || close_oldest # one more than cores
    started=$((started + 1))
    echo "started: $program --filter=$patterns"
    "$program" "--filter=$patterns" </dev/null >"$tmp/$started" 2>&1 &
    waiting+=("$! $started $program --filter=$patterns")
done
while [ ${#waiting[@]} != 0 ]; do close_oldest; done
[ ${#failures[@]} = 0 ] || printf 'failed: %s\n' "${failures[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ $((passed + skipped)) != 0 ]
