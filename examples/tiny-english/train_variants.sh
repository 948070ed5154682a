#!/usr/bin/env bash
# Train the variants of a small story model that differ in one component, three seeds of each, on one GPU.
#   bash examples/tiny-english/train_variants.sh [SEED…]
# reads data/stories, which train.sh writes, and writes runs/variants/NAME-SEED. All variants of a seed run at once.
set -euo pipefail
scripts=$(dirname "$0")
declare -A variants=(
    [base]=""
    [layernorm]="model.decoder.norm.kind=layernorm"
    [post-norm]="model.decoder.placement.kind=post"
    [learned]="model.decoder.block.attention.position.kind=none model.decoder.embedding.position.kind=learned model.decoder.embedding.position.length=512"
    [sinusoidal]="model.decoder.block.attention.position.kind=none model.decoder.embedding.position.kind=sinusoidal model.decoder.embedding.scale=sqrt_d_model"
    [alibi]="model.decoder.block.attention.position.kind=alibi"
    [no-positions]="model.decoder.block.attention.position.kind=none"
)
tokenizer=$(python -c "from cutaway.pretrained import find_pretrained; print(find_pretrained('tiny-english'))")
[ $# -gt 0 ] || set -- 0 1 2
for seed in "$@"; do
    for name in "${!variants[@]}"; do
        run=runs/variants/$name-$seed
        mkdir -p runs/variants
        options=(--set "training.seed=$seed" --set "data.tokenizer.path=$tokenizer")
        for option in ${variants[$name]}; do options+=(--set "$option"); done
        if [ -d "$run" ]; then
            cutaway train --resume "$run" &> "$run.log" &
        else
            cutaway train "$scripts/variants.toml" --out "$run" "${options[@]}" &> "$run.log" &
        fi
    done
    wait
done
