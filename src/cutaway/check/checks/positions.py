"""Positions: that there are any, and that only distances count where that is meant."""
