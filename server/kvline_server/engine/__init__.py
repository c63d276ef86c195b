"""One engine step: schedule, run, sample, publish."""
