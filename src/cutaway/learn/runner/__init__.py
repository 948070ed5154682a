"""Running and grading a learner's file: a worker process with limits, its launcher, and the grader of what it gives."""
