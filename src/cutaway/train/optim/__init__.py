"""Optimizers, learning rate schedules, weight averages and loss scaling."""
