"""The local cluster's error: one line for the user."""

from __future__ import annotations


class ClusterError(Exception):
    pass
