"""Optimizers, learning rate schedules, weight EMA, mixed precision and loss scaling."""
