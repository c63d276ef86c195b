"""What the model of these tests writes where a request has the marker `forced:NAME`, turn by turn.
Behind `thought` it writes what its random weights and a grammar make of it."""

from __future__ import annotations

TEXT = "It is sunny in Paris, and 21\u00b0 warm \U0001f31e."
REASONING = "Paris is a city, so its weather is known."
CALLING = "I ask for both."


def call(city: str) -> str:
    return (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    )


OUTPUTS: dict[str, tuple[str, ...]] = {
    "text": (TEXT,),
    "call": (call("Paris"), TEXT),
    "calls": (f"{CALLING}\n{call('Paris')}\n{call('Rome')}", TEXT),
    "reasoning": (f"<think>\n{REASONING}\n</think>\n\n{TEXT}",),
    "thought": (f"<think>\n{REASONING}\n</think>\n\n",),
    "json": ('{"city": "Paris"}',),
}
