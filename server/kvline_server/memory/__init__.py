"""Memory: the profile loop, device accounting, the KV arena, pages and the prefix cache."""
