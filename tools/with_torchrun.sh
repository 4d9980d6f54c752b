#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# with_torchrun.sh - run a command with a torchrun in PATH: the one that is there, or that of a
# virtual environment that this script makes.
#
#   tools/with_torchrun.sh VENV COMMAND...     VENV: a directory, made at the first use
#
# It installs the package torch by pip, with pip's own settings (PIP_INDEX_URL chooses smaller
# wheels for CPUs): several GB in some minutes. Where that is not possible it says why, and runs the
# command all the same: tests that need torchrun are skipped visibly. Of the environment only
# torchrun is put into PATH, so that other programs find what they found before.
set -uo pipefail
limit=${TORCH_INSTALL_SECONDS:-1800}
venv=$1 && shift
say() { echo "torchrun: $*" >&2; }

install() { # into $venv; the last line of the output is the reason of a failure
    python3 -m venv "$venv" && timeout "$limit" "$venv/bin/pip" install --quiet --no-input \
        --disable-pip-version-check "${TORCH_PACKAGE:-torch}" || { echo "exit status $?" && false; }
}

if there=$(command -v torchrun); then
    say "$there"
elif ! command -v python3 >/dev/null; then
    say 'none here, and no python3 to install it'
else
    [ -x "$venv/bin/torchrun" ] || log=$(install 2>&1) || {
        say "none here, and pip could not install it: $(tail -n 3 <<<"$log" | tr '\n' ' ')"
        rm -rf "$venv"
    }
    if [ -x "$venv/bin/torchrun" ]; then
        mkdir -p "$venv/only" && ln -sf ../bin/torchrun "$venv/only/torchrun"
        PATH=$(cd "$venv/only" && pwd):$PATH
        version='import torch; print(torch.__version__)'
        say "$venv: torch $("$venv/bin/python" -W ignore -c "$version" 2>/dev/null)"
    fi
fi
exec "$@"
