"""What the stress puts in the place of a mixture's routers: what a step takes may depend on how
unequally the experts share its rows."""

from __future__ import annotations

from enum import IntEnum


class Played(IntEnum):
    NOTHING = 0  # the routers choose
    UNEQUAL = 1  # every row goes to the same experts
    EVEN = 2  # all experts have as many rows, to within one


# As a report has it. All of them are played where a model has a mixture of experts.
PLAYED = {
    Played.UNEQUAL: "every row to the same experts",
    Played.EVEN: "rows to all experts alike",
}
