"""The replay of docs/trace.md once more, as plainly as it can be written: to compare the page's with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class State:
    tables: dict[int, list[int]] = field(default_factory=dict)  # by sequence
    seats: list[int] = field(default_factory=list)  # -1: empty
    generated: dict[int, int] = field(default_factory=dict)

    def owners(self, num_blocks: int) -> list[list[int]]:
        """Who has each block, smallest number first."""
        return [[s for s, table in sorted(self.tables.items()) if b in table] for b in range(num_blocks)]

    def sit(self, sequence: int) -> None:
        if sequence not in self.seats:
            if -1 not in self.seats:
                self.seats.append(-1)
            self.seats[self.seats.index(-1)] = sequence

    def leave(self, sequence: int) -> None:
        self.tables.pop(sequence, None)
        self.seats = [-1 if s == sequence else s for s in self.seats]


def replay(trace: dict[str, Any], position: int) -> State:
    """The state after the first `position` records."""
    state = State()
    for record in trace["steps"][:position]:
        for sequence in record["released"] + record["preempted"]:
            state.leave(sequence)
        for sequence, _ in record["admitted"]:
            state.sit(sequence)
        for sequence, first, blocks in record["tables"]:
            state.sit(sequence)
            state.tables[sequence] = state.tables.get(sequence, [])[:first] + blocks
        for sequence, _, _ in record["sampled"]:
            parent = trace["sequences"][sequence]["parent"]
            if parent is not None and sequence not in state.generated and parent in state.tables:
                state.sit(sequence)
                state.tables[sequence] = list(state.tables[parent])
            state.generated[sequence] = state.generated.get(sequence, 0) + 1
    return state


def texts(trace: dict[str, Any], position: int) -> list[str]:
    """What each sequence has said by then."""
    generated = replay(trace, position).generated
    return ["".join(s["pieces"][: generated.get(i, 0)]) for i, s in enumerate(trace["sequences"])]
