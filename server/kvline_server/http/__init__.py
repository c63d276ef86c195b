"""An HTTP process: validates, tokenises, streams. Imports no torch."""
