"""Rollouts: completions sampled from the model in training, their rewards and their advantages."""
