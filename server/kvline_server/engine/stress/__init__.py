"""The stress set: the largest steps of service, by owner."""
