#!/bin/sh
# SPDX-License-Identifier: MIT
# fill.sh - writes the recipes for a release that lies at a URL: packaging/fill.sh URL ARCHIVE FOLDER
set -eu
[ $# = 3 ] || { echo "usage: packaging/fill.sh URL ARCHIVE FOLDER" >&2 && exit 2; }
here=$(dirname "$0")
mkdir -p "$3"
cp -R "$here/vcpkg" "$here/conan" "$here/spack" "$3"
hash() { "sha$1sum" "$2" | cut -d ' ' -f 1; }
find "$3" -type f -exec sed -i -e "s|@URL@|$1|" -e "s|@SHA256@|$(hash 256 "$2")|" \
    -e "s|@SHA512@|$(hash 512 "$2")|" {} +
