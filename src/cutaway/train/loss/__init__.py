"""Loss functions: cross-entropy over chunks of targets, for any head or a linear one, and load balancing of experts."""
