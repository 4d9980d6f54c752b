#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run_tests.sh - run test programs side by side; close with the time that it took, the slowest ten,
# and one total: "N passed, N failed, N skipped".
#
#   tools/run_tests.sh [--target=T] [--tags=TAGS] [--filter=PATTERN] [--ran=FILE] WORD...
#
# A word is one of
#   variant:NAME       its programs, with the tags that tests/variants has for T (test), and TAGS
#   PROGRAM            prints GoogleTest's lines (tests/harness.h does); *.py is run by python3
#   gate:NAME          a gate of tools/check.sh
#   VARIABLE=VALUE     holds for the programs behind it, up to a word --
#   skip:NAME:REASON   counts one test that cannot run here
#
# --filter runs only tests with this text, or of this glob; it leaves out *.py.
# --ran, without a filter: FILE gets a line "PROGRAM TEST RESULT" for each test; at the end a
# gate checks that tests named in documents and ported tests passed (check_text.py tests).
# So many programs run at a time: JOBS, or two for a core and six more, as they wait half of the
# time. Each is shown as a whole when it has ended; with JOBS=1, as it runs. A terminal shows one
# line of progress, and only programs in which something failed. Why tests were skipped stands at
# the end. The exit status is 0 only if something ran and nothing failed.
set -fuo pipefail # names may hold globs

# Adds what job number $1 printed: each RUN line is closed by the result line with its name.
count() { # NUMBER STATUS MILLISECONDS NAME
    awk -v number="$1" -v status="$2" -v ms="$3" -v name="$4" -v ran="$FSDP_JOBS/ran" \
        -v skips="$FSDP_JOBS/skips" '
        function is(line) { return open != "" && (index(line, open " ") == 1 || line == open) }
        function close_as(result) { print program "\t" open "\t" result >>ran; open = "" }
        BEGIN {
            program = name
            sub(/^python3 /, "", program); sub(/[: ].*/, "", program)
            sub(/.*\//, "", program); sub(/\.py$/, "", program)
        }
        { rest = substr($0, 14) }
        /^\[ RUN      \] / { if (open == "") open = rest; next }
        /^\[       OK \] / && is(rest) { ok++; close_as("OK") }
        /^\[  SKIPPED \] / && is(rest) {
            if (length(rest) > length(open) + 1) # a name, and the reason in brackets
                print substr(rest, length(open) + 3, length(rest) - length(open) - 3) >>skips
            skip++; close_as("SKIPPED")
        }
        /^\[  FAILED  \] / && is(rest) { bad++; names = names " " open; close_as("FAILED") }
        END {
            if (open != "") { bad++; names = names " " open "(unfinished)" }
            if (!bad && status) { bad = 1; names = " exit-status-" status }
            if (!(ok + bad + skip)) { bad = 1; names = " ran-no-test" }
            printf "%d\t%d\t%d\t%d\t%s\t%s\n", ms, ok, bad, skip, name, names
        }' "$FSDP_JOBS/$1.log" >>"$FSDP_JOBS/results"
}

# One line that replaces itself: how many programs are done, tests that failed, and the time left if
# the rest takes as long.
progress() {
    awk -F '\t' -v all="$(wc -l <"$FSDP_JOBS/list")" -v s=$(($(date +%s) - FSDP_STARTED)) '
        { bad += $3 }
        END {
            left = int(s * (all - NR) / NR)
            printf "%d of %d programs, %d tests failed, about %d min %d s left", NR, all, bad,
                left / 60, left % 60
            if (NR == all) printf "\n"
        }' "$FSDP_JOBS/results"
}

if [ "${1-}" = --one ]; then # a job: a line of the list, as variables, program and filter
    command=$(sed -n "$2p" "$FSDP_JOBS/list") start=$(date +%s%N)
    if [ "${JOBS-}" = 1 ]; then
        echo "== $command"
        env $command </dev/null 2>&1 | tee "$FSDP_JOBS/$2.log"
        status=${PIPESTATUS[0]}
    else
        env $command </dev/null >"$FSDP_JOBS/$2.log" 2>&1
        status=$?
        exec 9>"$FSDP_JOBS/lock" && flock 9
        [ ! -t 1 ] || printf '\r\033[K'
        [ -t 1 ] && [ "$status" = 0 ] || { echo "== $command" && cat "$FSDP_JOBS/$2.log"; }
    fi
    name=$(sed -E 's/^([A-Z_]+=[^ ]* )*//; s/^.*check\.sh --one /gate /' <<<"$command")
    name=${name% --filter=*}
    count "$2" "$status" $((($(date +%s%N) - start) / 1000000)) "$name"
    [ "${JOBS-}" = 1 ] || [ ! -t 1 ] || progress
    exit 0
fi

target=test tags='' filter='' ran='' variables=()
FSDP_STARTED=$(date +%s) && export FSDP_STARTED
while :; do
    case ${1-} in
    --target=*) target=${1#*=} ;;
    --tags=*) tags=${1#*=} ;;
    --filter=*) filter=${1#*=} ;;
    --ran=*) ran=${1#*=} ;;
    *) break ;;
    esac
    shift
done
FSDP_JOBS=$(mktemp -d) && export FSDP_JOBS && trap 'rm -rf "$FSDP_JOBS"' EXIT
for file in list results ran skips; do : >"$FSDP_JOBS/$file"; done
add() { echo "${variables[*]-} $*" | sed 's/^ *//' >>"$FSDP_JOBS/list"; }
skip() { # NAME REASON
    printf '[ RUN      ] %s\n[  SKIPPED ] %s (%s)\n' "$1" "$1" "$2"
    printf '0\t0\t0\t1\t%s\t\n' "$1" >>"$FSDP_JOBS/results"
    printf '%s\t%s\tSKIPPED\n' "$1" "$1" >>"$FSDP_JOBS/ran"
    echo "$2" >>"$FSDP_JOBS/skips"
}
# A program, if it has such tests, or something to complain about.
program() { # PATH TAGS ENVIRONMENT...
    local options=() names
    [ -z "$2$tags" ] || options+=("--tags=$2${2:+${tags:+:}}$tags")
    [ -z "$filter" ] || options+=("--filter=$filter")
    ! names=$("$1" --list "${options[@]}" 2>&1) || [ -n "$names" ] || return 0
    add "${@:3}" "$1" "${options[@]}"
}
variant() { # NAME
    local its_tags command
    while IFS=$'\t' read -r its_tags command; do
        program "${command##* }" "$its_tags" ${command% *}
    done < <(tools/variants.sh runs "$target" "$1")
}
for word; do
    case $word in
    --) variables=() ;;
    gate:*) add "tools/check.sh --one ${word#gate:}" ;;
    variant:*) variant "${word#variant:}" ;;
    skip:*)
        [ -n "$filter" ] || { IFS=: read -r _ name reason <<<"$word" && skip "$name" "$reason"; } ;;
    [A-Z]*=*) variables+=("$word") ;;
    *.py)
        if [ -n "$filter" ]; then :
        elif command -v python3 >/dev/null; then add python3 "$word"
        else skip "$word" 'no python3'; fi ;;
    *) program "$word" '' ;;
    esac
done
# These wait for minutes: they start first, so that none is left alone at the end.
long='/test_(fsdprun|gloo_faults|nccl|nccl_faults)( |$)'
{ grep -E "$long" "$FSDP_JOBS/list"; grep -vE "$long" "$FSDP_JOBS/list"; } >"$FSDP_JOBS/sorted"
mv "$FSDP_JOBS/sorted" "$FSDP_JOBS/list"
seq "$(wc -l <"$FSDP_JOBS/list")" | xargs -r -P "${JOBS:-$((2 * $(nproc) + 6))}" -n 1 "$0" --one
if [ -n "$ran" ] && [ -z "$filter" ]; then
    sort "$FSDP_JOBS/ran" >"$ran"
    add "FSDP_RAN=$ran" tools/check.sh --one text.tests
    "$0" --one "$(wc -l <"$FSDP_JOBS/list")"
fi

sort "$FSDP_JOBS/skips" | uniq -c | sort -rn | awk '
    NR == 1 { print "skipped, and why:" }
    { n = $1; sub(/^ *[0-9]+ /, ""); printf "%6d  %s\n", n, $0 }'
sort -rn "$FSDP_JOBS/results" | awk -F '\t' -v seconds=$(($(date +%s) - FSDP_STARTED)) '
    { ok += $2; bad += $3; skipped += $4 }
    $3 { failed = failed "failed: " $5 ":" $6 "\n" }
    NR <= 10 && $1 >= 1000 { slow = slow sprintf("%8.1f s  %s\n", $1 / 1000, $5) }
    END {
        printf "%s%s", slow == "" ? "" : "the slowest, of " seconds " s in all:\n" slow, failed
        print ok + 0 " passed, " bad + 0 " failed, " skipped + 0 " skipped"
        exit bad || !(ok + skipped)
    }'
