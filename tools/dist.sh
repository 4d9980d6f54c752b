#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# dist.sh - packs a release: the files that git lists, and each header as one file in single/.
#
#   tools/dist.sh BUILD NAME     writes BUILD/NAME.tar.gz
#
# Names are sorted and times are the commit's: a commit gives the same bytes wherever it is packed.
set -euo pipefail
build=$1 name=$2
[ -e .git ] || { echo "make dist needs a clone: it packs the files that git lists"; exit 1; }
git diff --quiet HEAD || echo "note: $name has changes that are not committed"
rm -rf "$build/dist"
mkdir -p "$build/dist/$name"
git ls-files -z | xargs -0 cp --parents -t "$build/dist/$name"
tools/amalgamate.py "$build/dist/$name/single"
tar -c -I 'gzip -n' -f "$build/$name.tar.gz" --format=gnu --sort=name --owner=0 --group=0 \
    --numeric-owner --mode=u=rwX,go=rX --mtime="@$(git log -1 --format=%ct)" \
    -C "$build/dist" "$name"
