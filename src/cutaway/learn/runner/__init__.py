"""Run and grade a learner's file, in a worker process with resource limits."""
