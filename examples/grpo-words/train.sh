#!/bin/sh
# GRPO on tiny-english with two seeds, and the share of right answers before and after: minutes on one core
set -e
cd "$(dirname "$0")/../.."
python examples/grpo-words/write_prompts.py data/words
for seed in 0 1; do
    cutaway train grpo --base tiny-english --data data/words/train.jsonl --out runs/words-$seed \
        --set objective.reward=examples/grpo-words/rewards.py:correct_word --set objective.max_new_tokens=2 \
        --set objective.num_generations=16 --set data.seq_len=24 --set optimizer.lr=1e-4 \
        --set training.max_steps=30 --set training.batch_size=16 --set training.seed=$seed --set eval.interval=5
done
python examples/grpo-words/measure.py data/words/held-out.jsonl tiny-english runs/words-0 runs/words-1
python examples/grpo-words/plot.py docs/howto/grpo-reward.svg runs/words-0 runs/words-1
