"""What runs as long as the process: the Lease, the queue, watches, resync, and its own port."""
