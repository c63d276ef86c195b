"""How models write tool calls and reasoning: read as they come, and asked for by grammars."""
