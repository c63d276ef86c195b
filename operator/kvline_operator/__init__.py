"""The operator: turns InferenceServices into pods and their measured sizes into status."""
