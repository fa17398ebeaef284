#!/bin/sh
# An environment of its own for the differential tests: the peers beside this package, on CPU, in one process.
# Usage: sh tests/differential/make_env.sh PYTHON FOLDER   (from the repository's root)
set -eu
python=${1:-python3}
folder=${2:-.venv-peers}
here=tests/differential

"$python" -m venv "$folder"
pip="$folder/bin/pip install -q --disable-pip-version-check"
$pip -c constraints.txt -r $here/requirements.txt
$pip --no-deps -r $here/requirements-no-deps.txt
$pip --no-deps -e .
