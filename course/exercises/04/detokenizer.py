"""Exercise 4.2: bytes to text while they arrive.

`add(data)` takes the bytes of the next token and returns the text that is now certain: all characters that
are complete, and none that may still get another byte. `finish()` returns the rest when no more bytes come.

All pieces together must be what bytes.decode("utf-8", errors="replace") makes of all bytes together. Bytes
that can never become a character show as U+FFFD, and must not wait: as soon as that is certain, it is text.

Do not use the incremental decoders of `codecs` or `io`.
"""

from __future__ import annotations


class Detokenizer:
    def add(self, data: bytes) -> str:
        raise NotImplementedError("Your turn")

    def finish(self) -> str:
        raise NotImplementedError("Your turn")
