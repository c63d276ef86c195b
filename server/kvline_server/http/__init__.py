"""The HTTP edge: validates, tokenises, streams. Imports no torch."""
