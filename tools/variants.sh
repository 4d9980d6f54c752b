#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# variants.sh - reads tests/variants, the table of the variants of the tests.
#
#   tools/variants.sh list TARGET           the variants of make TARGET: test, check, nightly, ...
#   tools/variants.sh make TARGET VARIANT   words for the make that builds it; TARGET any: for each
#   tools/variants.sh runs TARGET VARIANT   its programs, one a line: the value of --tags, a tab,
#                                           environment and path
#   tools/variants.sh programs TAGS         names of programs that may have tests with these tags
#
# BUILD is the build directory. A program is one of a tag if its code names the tag anywhere: in
# AT_NIGHT for a night.TAG, for a TAG outside of AT_NIGHT and NO. So an edit of a test needs no edit
# elsewhere. Which of its tests have the tag only the program knows: PROGRAM --list --tags=TAG.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${BUILD:-${FSDP_BUILD:-build}}

# Lines "VARIANT|MAKE|TAGS|ENVIRONMENT" of the table, those that TARGET runs.
lines() { # TARGET
    awk -F '|' -v target="$1" '
        function trim(s) { gsub(/^ +| +$/, "", s); return s }
        /^\$/ { i = index($0, "="); short[trim(substr($0, 1, i - 1))] = trim(substr($0, i + 1)) }
        /^#/ || NF < 6 { next }
        trim($1) != "" { name = trim($1); make = trim($2) }
        {
            tags = target == "nightly" ? trim($5) : target == trim($3) ? trim($4) : ""
            if (target == "any")
                tags = trim($4) (trim($4) != "" && trim($5) != "" ? ":" : "") trim($5)
            text = make "|" tags "|" trim($6)
            for (s in short)
                while (i = index(text, s))
                    text = substr(text, 1, i - 1) short[s] substr(text, i + length(s))
            if (tags != "") print name "|" text
        }' tests/variants
}

# Of each file: `plain`, what is outside of AT_NIGHT() and NO(), which stand in `night` and `not`;
# and `refused`, what those of its TAGS say.
programs() { # TAGS
    awk -v tags="$1" '
        function code(line,    i, rest) { # without comments and strings
            if (inside && !(i = index(line, "*/"))) return ""
            if (inside) { line = substr(line, i + 2); inside = 0 }
            gsub(/"([^"\\]|\\.)*"/, "", line)
            sub(/\/\/.*/, "", line)
            while (i = index(line, "/*")) {
                rest = substr(line, i + 2)
                line = substr(line, 1, i - 1)
                if (!(i = index(rest, "*/"))) { inside = 1; break }
                line = line " " substr(rest, i + 2)
            }
            return line
        }
        function names(text, tag) {
            return (" " text " ") ~ ("[^A-Za-z0-9_]" tag "[^A-Za-z0-9_]")
        }
        function by_default(tag) { # as h_register has it
            return tag == "SHM" || tag == "ASAN" && !names(refused, "SHM")
        }
        function has(tag) { return names(plain, tag) || by_default(tag) && !names(refused, tag) }
        function has_at_night(tag) {
            if (tag == "SHM") return names(plain, "NIGHT")
            return names(night, tag) ||
                   names(plain, "MANY_RANKS") && (names(plain, tag) || by_default(tag))
        }
        function take(text,    line, said, part, other) {
            line = code(text)
            while (match(line, /(AT_NIGHT|NO)\([^()]*\)/)) {
                said = substr(line, RSTART, RLENGTH)
                line = substr(line, 1, RSTART - 1) " " substr(line, RSTART + RLENGTH)
                if (said ~ /^AT_NIGHT/) night = night " " said
                if (text ~ /^#define TAGS/) refused = refused " " said
            }
            if (line ~ /[A-Z]/) plain = plain " " line
            if (text !~ /^#include "test_.*\.c"/) return
            other = FILENAME # its tests are in this program, too
            sub(/[^\/]*$/, "", other)
            split(text, part, "\"")
            other = other part[2]
            while ((getline line <other) > 0) take(line)
            close(other)
        }
        function tell(    i, word) {
            for (i = 1; i <= num; i++) {
                word = words[i]
                if (word ~ /^-/) continue
                if (sub(/^night\./, "", word) ? has_at_night(toupper(word)) : has(toupper(word))) {
                    sub(/.*\//, "", file); sub(/\.c(pp)?$/, "", file)
                    print file
                    return
                }
            }
        }
        BEGIN { num = split(tags, words, ":") }
        FNR == 1 {
            if (file) tell()
            file = FILENAME
            plain = night = refused = ""
            inside = 0
        }
        { take($0) }
        END { tell() }' tests/*/test_*.c* tests/*/conformance.c
}

case ${1-} in
list) lines "$2" | cut -d '|' -f 1 | uniq ;;
programs) programs "$2" ;;
make | runs)
    dir=$build/$3
    [ "$3" != shm ] || dir=$build
    [ "$1" != make ] || echo -n "BUILD=$dir"
    lines "$2" | while IFS='|' read -r name words tags environment; do
        [ "$name" = "$3" ] || continue
        front="$tags"$'\t'"FSDP_BUILD=$dir ${environment:+$environment }"
        case $1 in
        make) echo -n "" $words $(programs "$tags" | sed "s|^|$dir/tests/|") ;;
        runs) programs "$tags" | sed "s|^|$front$dir/tests/|" ;;
        esac
    done ;;
*) sed -n '4,11p' "$0" && exit 2 ;;
esac
