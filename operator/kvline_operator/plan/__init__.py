"""What should be, from values to values: revisions, gate, rollout, child objects. Pure."""
