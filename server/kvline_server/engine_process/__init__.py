"""The engine process: starts, then steps the engine and exchanges messages."""
