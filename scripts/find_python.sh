#!/bin/sh
# Prints the path of a working Python >= 3.12 that can create virtual environments, or an error and exits with 2.
#
# Searches PATH and the versions of pyenv, for 3.12 first, because the project is tested with that version.
# Every candidate is run, because a pyenv shim exists even if its version is not selected.

works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

IFS=:
for name in python3.12 python3.13 'python3.[0-9]*' python3 python; do
    for folder in $PATH "${HOME:-}"/.pyenv/versions/*/bin ${PYENV_ROOT:+"$PYENV_ROOT"/versions/*/bin}; do
        for candidate in "$folder"/$name; do
            if [ -x "$candidate" ] && [ ! -d "$candidate" ] && works "$candidate"; then
                printf '%s\n' "$candidate"
                exit 0
            fi
        done
    done
done

echo "No working Python >= 3.12 (with venv and ensurepip) was found on PATH or under ~/.pyenv/versions;" \
    "install one and run make again." >&2
exit 2
