#!/usr/bin/env bash
# Installs packages for a Python: install.sh PYTHON ARGUMENTS-OF-PIP-INSTALL. uv takes a minute where pip takes ten; pip
# follows where uv fails, because it reads a configuration of mirrors and folders that uv does not know.
set -euo pipefail
python=$1
shift
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip install --quiet uv 2>/dev/null || true
"$python" -m uv pip install --quiet --python "$python" --compile-bytecode --system-certs "$@" || "$python" -m pip install --quiet "$@"
