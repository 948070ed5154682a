"""The training loop: start-up, steps, evaluation, checks before training, dry run."""
