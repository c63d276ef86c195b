"""The parent process: starts the HTTP and engine processes, answers probes, keeps the report."""
