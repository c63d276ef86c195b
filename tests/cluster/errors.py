"""The local cluster's errors: one line for the user."""

from __future__ import annotations


class ClusterError(Exception):
    pass


class NotWithin(ClusterError):
    """Something was waited for, and did not come in time."""
