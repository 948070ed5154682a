"""Run and grade a learner's file: a worker process with resource limits, its launcher, and the grader."""
