"""Exercise 4.2: bytes to text while they arrive.

`add(data)` takes the bytes of the next token and returns the text that is now certain: all characters that
are complete, and none that may still get another byte. `finish()` returns the rest when no more bytes come.

All pieces together must be what bytes.decode("utf-8", errors="replace") makes of all bytes together. Bytes
that can never become a character show as U+FFFD, and must not wait: as soon as that is certain, it is text.

Do not use the incremental decoders of `codecs` or `io`.
"""

from __future__ import annotations


class Detokenizer:
    def __init__(self) -> None:
        self.waiting = b""  # the beginning of a character: at most 3 bytes

    def add(self, data: bytes) -> str:
        data = self.waiting + data
        certain = len(data) - _unfinished(data)
        self.waiting = data[certain:]
        return data[:certain].decode("utf-8", errors="replace")

    def finish(self) -> str:
        rest, self.waiting = self.waiting, b""
        return rest.decode("utf-8", errors="replace")


def _unfinished(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    for count in (3, 2, 1):
        try:
            data[-count:].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return min(count, len(data))
    return 0
