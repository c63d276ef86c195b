"""The InferenceService as users write it, parsed to values."""
