#!/bin/sh
# Prints the path of a Python >= 3.12 that runs and can make virtual environments; says so and exits with 2 if none can.
#
# Looks on PATH and under ~/.pyenv/versions (and PYENV_ROOT's), for 3.12 first, because that is the version the project
# is tested with.
# Every candidate is run: a pyenv shim of that name may exist although no such version is selected.

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
