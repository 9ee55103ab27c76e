"""The text of one output as its tokens arrive, and the stop string that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiny_vllm.detokenizer import Detokenizer


class OutputText:
    """Text that never has to be taken back, whatever comes next.

    ``text`` is what may be shown. What could still become part of a stop string waits; so does an unfinished
    character, in the detokenizer. A stop string may begin in one token and end in another. Of several, the
    one that ends first counts, and of those that end together the longest: how the text is cut into tokens
    makes no difference.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        """With `include_stop` the text ends after the stop string, and nothing has to wait."""
        self.text = ""
        self.stop: str | None = None  # the one that was found: the text is at its end
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._waiting = ""  # the longest end of the text that some stop string begins with

    def add(self, ids: Iterable[int], look_for_stop: bool = True) -> None:
        """Takes the next ids. Without `look_for_stop` no stop string may end in their text."""
        self._take(self._detokenizer.add(ids), look_for_stop)

    def finish(self, look_for_stop: bool = True) -> None:
        """No more ids will come: what waits is text like any other."""
        self._take(self._detokenizer.finish(), look_for_stop)
        if self.stop is None and not self._include_stop:
            self.text += self._waiting

    def _take(self, piece: str, look_for_stop: bool) -> None:
        if not self._stops:
            self.text += piece
            return
        if not piece or self.stop is not None:
            return
        # A stop string that ends in the piece begins in it, or in what waits.
        before, text = len(self._waiting), self._waiting + piece
        shown = before if self._include_stop else 0  # characters of `text` that are in self.text
        if look_for_stop and (found := _first_stop(text, before, self._stops)) is not None:
            self.stop, start = found
            self.text += text[shown : start + len(self.stop) if self._include_stop else start]
            return
        waits = max(_overlap(text, stop) for stop in self._stops)
        self._waiting = text[len(text) - waits :]
        self.text += text[shown : len(text) if self._include_stop else len(text) - waits]


def _first_stop(text: str, before: int, stops: Iterable[str]) -> tuple[str, int] | None:
    """The stop string that ends first after the first `before` characters, and where it begins."""
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        if (start := text.find(stop, max(0, before - len(stop) + 1))) >= 0
    ]
    if not found:
        return None
    _, start, stop = min(found)
    return stop, start


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text `stop` begins with; not all of them."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
