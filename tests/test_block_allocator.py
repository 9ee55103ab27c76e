"""The block allocator and its prefix index, driven alone: states, owners, eviction, and what is found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vllm._core import BlockAllocator
from tiny_vllm.errors import InternalError, InvalidRequestError


def fill(blocks: BlockAllocator, tokens: list[int], salt: int = 0) -> list[int]:
    """What a sequence does: takes over what is found, allocates the rest, computes it and registers it."""
    table = blocks.find_prefix(tokens, salt)
    blocks.share(table)
    begin = len(table) * blocks.block_size
    table += allocated(blocks, -(-len(tokens) // blocks.block_size) - len(table))
    blocks.register_blocks(table, tokens, salt, begin)
    return table


def allocated(blocks: BlockAllocator, count: int) -> list[int]:
    table = blocks.allocate(count)
    assert table is not None
    return table


def counts(blocks: BlockAllocator) -> tuple[int, int, int]:
    """(free, cached, owned), with the books checked."""
    blocks.check_invariants()
    free = blocks.free_blocks - blocks.cached_blocks
    assert free + blocks.cached_blocks + blocks.owned_blocks == blocks.num_blocks
    return free, blocks.cached_blocks, blocks.owned_blocks


# --- Owning ---


def test_allocate_is_all_or_nothing() -> None:
    blocks = BlockAllocator(3, 4)
    table = allocated(blocks, 2)
    assert sorted(set(table)) == sorted(table)
    assert blocks.allocate(2) is None
    assert counts(blocks) == (1, 0, 2)
    assert allocated(blocks, 0) == []
    blocks.release(table)
    assert counts(blocks) == (3, 0, 0)


def test_a_block_is_free_only_after_its_last_owner() -> None:
    blocks = BlockAllocator(2, 4)
    table = allocated(blocks, 1)
    blocks.share(table)
    blocks.share(table)
    assert blocks.ref_count(table[0]) == 3
    for left in (2, 1, 0):
        assert counts(blocks) == (1, 0, 1)
        blocks.release(table)
        assert blocks.ref_count(table[0]) == left
    assert counts(blocks) == (2, 0, 0)


def test_misuse_is_reported() -> None:
    blocks = BlockAllocator(2, 4)
    table = allocated(blocks, 1)
    other = 1 - table[0]
    blocks.release(table)
    with pytest.raises(InternalError, match="released more often"):
        blocks.release(table)
    with pytest.raises(InternalError, match="nothing to share"):
        blocks.share([other])
    for bad in (-1, 2):
        with pytest.raises(InternalError, match=f"block {bad} of 2"):
            blocks.release([bad])
        with pytest.raises(InternalError, match=f"block {bad} of 2"):
            blocks.share([bad])
    with pytest.raises(InternalError):
        blocks.allocate(-1)
    assert counts(blocks) == (2, 0, 0)


@pytest.mark.parametrize(
    ("num_blocks", "block_size"), [(0, 4), (-1, 4), (2**31, 4), (2, 0), (2, -3), (2, 2**21)]
)
def test_impossible_sizes_are_refused_by_name(num_blocks: int, block_size: int) -> None:
    with pytest.raises(InvalidRequestError, match="num_blocks" if block_size == 4 else "block_size"):
        BlockAllocator(num_blocks, block_size)


# --- Copy-on-write ---


def test_copy_on_write() -> None:
    blocks = BlockAllocator(4, 4)
    parent = allocated(blocks, 2)
    child = list(parent)
    blocks.share(child)

    source, copy = blocks.make_writable(child, 1)
    assert (source, copy) == (parent[1], child[1])
    assert child[0] == parent[0]
    assert child[1] != parent[1]
    assert blocks.make_writable(child, 1) is None, "it is the only owner of the copy"
    assert blocks.make_writable(parent, 1) is None, "the other owner has gone its own way"
    assert blocks.stats["copies"] == 1
    blocks.release(child)
    blocks.release(parent)
    assert counts(blocks) == (4, 0, 0)


def test_copy_on_write_without_a_free_block() -> None:
    blocks = BlockAllocator(1, 4)
    table = allocated(blocks, 1)
    blocks.share(table)
    with pytest.raises(InternalError, match="no block left"):
        blocks.make_writable(list(table), 0)


def test_what_can_be_found_is_never_written() -> None:
    blocks = BlockAllocator(2, 2)
    table = fill(blocks, [1, 2])
    findable = table[0]
    assert not blocks.is_writable(findable)
    assert blocks.make_writable(table, 0) == (findable, table[0])
    assert blocks.find_prefix([1, 2]) == [findable], "the old block keeps its content"


# --- Finding ---


def test_only_full_blocks_are_found_and_only_after_registration() -> None:
    blocks = BlockAllocator(4, 4)
    tokens = list(range(10))
    table = allocated(blocks, 3)
    assert blocks.find_prefix(tokens) == []
    blocks.register_blocks(table, tokens, 0, 0, 3)  # no block is full
    assert blocks.find_prefix(tokens) == []
    blocks.register_blocks(table, tokens, 0, 3, 9)
    assert blocks.find_prefix(tokens) == table[:2]
    assert blocks.find_prefix([*tokens[:4], 99, 5, 6, 7]) == table[:1]
    assert blocks.find_prefix(tokens[1:]) == []


def test_max_tokens_drops_the_block_that_must_be_computed() -> None:
    blocks = BlockAllocator(4, 4)
    table = fill(blocks, list(range(8)))
    tokens = list(range(8))
    assert blocks.find_prefix(tokens, max_tokens=8) == table
    assert blocks.find_prefix(tokens, max_tokens=7) == table[:1]
    assert blocks.find_prefix(tokens, max_tokens=3) == []
    assert blocks.find_prefix(tokens, max_tokens=0) == []


def test_the_walk_can_go_on_from_known_blocks() -> None:
    blocks = BlockAllocator(6, 2)
    table = fill(blocks, [1, 2, 3, 4, 5, 6])
    assert blocks.find_prefix([1, 2, 3, 4, 5, 6], known=table[:1]) == table[1:]
    with pytest.raises(InternalError, match="not registered"):
        blocks.find_prefix([1, 2, 3, 4], known=allocated(blocks, 1))


def test_off_means_off() -> None:
    blocks = BlockAllocator(4, 4, enable_prefix_caching=False)
    table = fill(blocks, list(range(8)))
    assert blocks.find_prefix(list(range(8))) == []
    blocks.release(table)
    assert counts(blocks) == (4, 0, 0)


def test_order_of_registration_is_checked() -> None:
    blocks = BlockAllocator(4, 2)
    table = allocated(blocks, 2)
    with pytest.raises(InternalError, match="before block 0"):
        blocks.register_blocks(table, [1, 2, 3, 4], 0, 2, 4)
    blocks.register_blocks(table, [1, 2, 3, 4], 0, 0, 2)
    with pytest.raises(InternalError, match="registered twice"):
        blocks.register_blocks(table, [1, 2, 3, 4], 0, 0, 2)
    with pytest.raises(InternalError, match="tokens"):
        blocks.register_blocks(table, [1, 2, 3, 4], 0, 2, 6)


def test_the_second_copy_stays_private_and_its_chain_goes_on() -> None:
    blocks = BlockAllocator(8, 2)
    first, second = allocated(blocks, 1), allocated(blocks, 2)
    blocks.register_blocks(first, [1, 2])
    blocks.register_blocks(second, [1, 2, 3, 4])
    # One chain, its first block from the one sequence and its second from the other.
    assert blocks.find_prefix([1, 2, 3, 4]) == [first[0], second[1]]
    blocks.release(second)
    assert counts(blocks) == (6, 1, 1)
    blocks.release(first)
    assert counts(blocks) == (6, 2, 0)
    assert blocks.find_prefix([1, 2, 3, 4]) == [first[0], second[1]]


# --- Eviction ---


def test_free_blocks_go_first_then_the_least_recently_used() -> None:
    blocks = BlockAllocator(4, 2)
    a, b, c = (fill(blocks, [i, i]) for i in (1, 2, 3))
    for table in (b, a, c):
        blocks.release(table)
    assert counts(blocks) == (1, 3, 0)
    blocks.share(b)  # used again: now the most recent
    blocks.release(b)
    allocated(blocks, 1)
    assert blocks.stats["evictions"] == 0
    assert [allocated(blocks, 1) for _ in range(3)] == [a, c, b]
    assert blocks.stats["evictions"] == 3
    assert counts(blocks) == (0, 0, 4)


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    blocks = BlockAllocator(3, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    table = fill(blocks, tokens)
    blocks.release(table)
    for left in (2, 1, 0):
        allocated(blocks, 1)
        assert blocks.find_prefix(tokens) == table[:left]


def test_b21_a_recycled_block_does_not_answer_for_its_old_content() -> None:
    blocks = BlockAllocator(4, 16)
    a, b = list(range(32)), list(range(100, 164))
    blocks.release(fill(blocks, a))
    assert len(blocks.find_prefix(a)) == 2
    table = fill(blocks, b)
    assert blocks.find_prefix(a) == [], "gone as soon as the block has a new owner, before that one writes"
    blocks.release(table)
    assert blocks.find_prefix(a) == []
    assert len(blocks.find_prefix(b)) == 4
    assert blocks.stats["evictions"] == 2


def test_continuations_of_an_evicted_block_are_not_found_when_it_is_computed_again() -> None:
    blocks = BlockAllocator(3, 2)
    head, tail = fill(blocks, [1, 2, 3, 4])
    blocks.release([tail])
    blocks.release([head])
    blocks.share([tail])  # a neighbour of the head in time, and now younger
    blocks.release([tail])
    hold = allocated(blocks, 1)
    assert allocated(blocks, 1) == [head]
    blocks.release([head])
    again = fill(blocks, [1, 2])
    # The text is right, but nobody can vouch that the tail belongs to this head: it has another content id.
    assert blocks.find_prefix([1, 2, 3, 4]) == again
    blocks.release(hold)
    counts(blocks)


# --- Equal hash, different text (B22) ---


@pytest.mark.parametrize("constant_hash", [None, 0])
def test_b22_blocks_are_told_apart_by_their_whole_past(constant_hash: int | None) -> None:
    blocks = BlockAllocator(16, 4, constant_hash=constant_hash)
    x, y, z = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]
    xy = fill(blocks, x + y)
    assert blocks.find_prefix(x + y) == xy
    assert blocks.find_prefix(z + y) == [], "another first block"
    assert blocks.find_prefix(y) == [], "the same tokens at another position"
    assert blocks.find_prefix(y + x) == []
    assert blocks.find_prefix(x + x) == xy[:1]
    assert blocks.find_prefix(x + y, salt=7) == []
    salted = fill(blocks, x + y, salt=7)
    assert set(salted).isdisjoint(xy)
    assert blocks.find_prefix(x + y, salt=7) == salted
    assert blocks.find_prefix(x + y) == xy
    counts(blocks)


# --- Anything at all, against a model ---

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    num_blocks=st.integers(1, 10),
    block_size=st.integers(1, 3),
    constant_hash=st.sampled_from([None, 0]),
    operations=st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "end", "fork", "write"]),
            TEXTS,
            st.integers(0, 1),
            st.integers(0, 9),
        ),
        max_size=60,
    ),
)
def test_random_use(
    num_blocks: int,
    block_size: int,
    constant_hash: int | None,
    operations: list[tuple[str, list[int], int, int]],
) -> None:
    blocks = BlockAllocator(num_blocks, block_size, constant_hash=constant_hash)
    holds: dict[int, tuple[int, ...]] = {}  # block -> (salt, all tokens up to its end), once it is full
    tables: list[list[int]] = []
    texts: list[tuple[int, list[int]]] = []
    for operation, text, salt, pick in operations:
        i = pick % len(tables) if tables else 0
        if operation == "start":
            found = blocks.find_prefix(text, salt)
            for k, block in enumerate(found):
                assert holds[block] == (salt, *text[: (k + 1) * block_size])
            if blocks.stats["evictions"] == 0:  # then everything that was registered is there
                known = set(holds.values())
                expected = 0
                while (end := (expected + 1) * block_size) <= len(text) and (salt, *text[:end]) in known:
                    expected += 1
                assert len(found) == expected
            blocks.share(found)
            rest = blocks.allocate(-(-len(text) // block_size) - len(found))
            if rest is None:
                blocks.release(found)
            else:
                for block in rest:
                    holds.pop(block, None)
                table = found + rest
                blocks.register_blocks(table, text, salt, len(found) * block_size)
                for k in range(len(found), len(text) // block_size):
                    holds[table[k]] = (salt, *text[: (k + 1) * block_size])
                tables.append(table)
                texts.append((salt, text))
        elif operation == "end" and tables:
            blocks.release(tables.pop(i))
            texts.pop(i)
        elif operation == "fork" and tables:
            blocks.share(tables[i])
            tables.append(list(tables[i]))
            texts.append(texts[i])
        elif operation == "write" and tables and blocks.free_blocks > 0:
            last = tables[i][-1]
            others = sum(table.count(last) for table in tables) - 1
            full = len(texts[i][1]) % block_size == 0
            copied = blocks.make_writable(tables[i], len(tables[i]) - 1)
            assert (copied is not None) == (others > 0 or full), "shared or findable: not to be written"
            if copied is not None:
                holds.pop(copied[1], None)
            assert blocks.is_writable(tables[i][-1])
            if full:  # the copy is not registered; this sequence no longer takes part
                blocks.release(tables.pop(i))
                texts.pop(i)
        counts(blocks)
        owned = [block for table in tables for block in table]
        assert blocks.owned_blocks == len(set(owned))
        for block in set(owned):
            assert blocks.ref_count(block) == owned.count(block)
    for table in tables:
        blocks.release(table)
    assert counts(blocks)[2] == 0
