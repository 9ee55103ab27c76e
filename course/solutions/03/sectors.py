"""Exercise 3.2: what a load costs.

Memory comes in sectors of 32 bytes: bytes 0 to 31 are sector 0, bytes 32 to 63 sector 1, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

SECTOR = 32


def sectors(addresses: Sequence[int], size: int) -> int:
    """How many sectors must be fetched when each thread of a warp loads `size` bytes from its address.

    A sector that several threads want is fetched once. An address may be any number, so what a thread loads
    may lie in two sectors.
    """
    return len({byte // SECTOR for address in addresses for byte in range(address, address + size)})


def share_used(addresses: Sequence[int], size: int) -> float:
    """Which part of the bytes that are fetched is wanted by some thread, from 0 to 1."""
    wanted = {byte for address in addresses for byte in range(address, address + size)}
    return len(wanted) / (sectors(addresses, size) * SECTOR)
