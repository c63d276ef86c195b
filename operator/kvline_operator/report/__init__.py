"""Status, conditions, events, metrics and advice, from what was observed and planned."""
