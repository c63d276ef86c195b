"""The profile loop and what it measures: devices, the KV arena, pages, the prefix cache."""
