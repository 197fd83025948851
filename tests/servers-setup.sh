#!/bin/sh
# The Python servers that tests/shares.rs and tests/servers.rs run, in a virtual environment: servers-setup.sh DIR
set -eu
dir=$1
[ -x "$dir/bin/gunicorn" ] && [ -x "$dir/bin/uvicorn" ] && exit 0
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check gunicorn==23.0.0 uvicorn==0.38.0
