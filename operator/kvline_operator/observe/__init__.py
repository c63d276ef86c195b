"""What there is in the cluster, from lists and from the pods' reports to values."""
