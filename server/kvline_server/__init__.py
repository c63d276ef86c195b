"""An inference server that measures and validates its own KV-cache budget."""
