"""Request models: strict types, both bounds on every number, unknown fields rejected.

Every accepted field has its effect. Ignored are only labels such as `user`, which by OpenAI's
definition change no answer, nulls, and the values that neutral.py lists.
"""
