#!/bin/sh
# Prints a Python 3.12 or 3.13 that can make virtual environments, or says why there is none.
# PYTHON=/path/to/python names one.

usable() {
    command -v "$1" >/dev/null 2>&1 && "$1" - >/dev/null 2>&1 <<'PY'
import sys
import ensurepip, venv
sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))
PY
}

if [ -n "$PYTHON" ]; then
    usable "$PYTHON" && { echo "$PYTHON"; exit 0; }
    echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13 with the venv module." >&2
    exit 1
fi
for candidate in python3.13 python3.12 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python \
    /opt/*/bin/python3.1[23] /usr/local/bin/python3.1[23]; do
    if usable "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done
if command -v uv >/dev/null 2>&1; then
    found=$(uv python find '>=3.12,<3.14' 2>/dev/null) && usable "$found" && {
        echo "$found"
        exit 0
    }
fi
echo "Found no Python 3.12 or 3.13 with the venv module. Install one (on Debian: python3.13 and" >&2
echo "python3.13-venv), or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
