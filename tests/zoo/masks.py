"""Bugs in masks: padding that is seen, text that is not."""
