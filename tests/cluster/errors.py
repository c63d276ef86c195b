"""What the local cluster says when it cannot go on: one clear line."""

from __future__ import annotations


class ClusterError(Exception):
    pass
