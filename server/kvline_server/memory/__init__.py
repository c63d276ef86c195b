"""Memory: device accounting, the KV cache's arena, pages and the prefix cache."""
