"""Exercise 19.1: the prefix cache, with a memory whose slots hold the names of texts."""

from __future__ import annotations

import random
from typing import Any

import pytest
from conftest import Exercise


@pytest.fixture
def make(exercise: Exercise) -> Any:
    return exercise.python("prefix_cache.py").PrefixCache


def filled(cache: Any, tokens: list[int]) -> list[int]:
    """What a request does with its prompt."""
    table: list[int] = list(cache.find(tokens))
    cache.share(table)
    table += cache.allocate(-(-len(tokens) // 4) - len(table))
    cache.register(table, tokens)
    return table


def test_full_blocks_are_found_and_the_last_token_is_computed(make: Any) -> None:
    cache = make(8, 4)
    table = filled(cache, list(range(10)))
    assert cache.find(list(range(12))) == table[:2], "the third block is not full"
    assert cache.find(list(range(8))) == table[:1], "token 7 must be computed"
    assert cache.find(list(range(4))) == []
    assert cache.find([0, 1, 2, 3, 99, 5, 6, 7, 8]) == table[:1]


def test_equal_tokens_after_another_past_are_something_else(make: Any) -> None:
    cache = make(8, 4)
    first = filled(cache, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    assert cache.find([2, 2, 2, 2, 5, 6, 7, 8, 9]) == []
    assert cache.find([5, 6, 7, 8, 9]) == []
    second = filled(cache, [2, 2, 2, 2, 5, 6, 7, 8, 9])
    assert not set(first) & set(second)


def test_owners_are_counted(make: Any) -> None:
    cache = make(4, 4)
    first = filled(cache, [1, 2, 3, 4, 5])
    second = filled(cache, [1, 2, 3, 4, 6])
    assert first[0] == second[0]
    assert cache.counts() == (1, 0, 3)
    cache.release(first)
    assert cache.counts() == (2, 0, 2)
    cache.release(second)
    assert cache.counts() == (3, 1, 0)
    assert filled(cache, [1, 2, 3, 4, 7])[0] == first[0], "nobody owned it, but it was still there"
    assert cache.counts() == (2, 0, 2)


def test_a_block_that_grows_full_can_be_found(make: Any) -> None:
    cache = make(4, 4)
    table = filled(cache, [1, 2, 3])
    assert cache.find([1, 2, 3, 4, 5]) == []
    cache.register(table, [1, 2, 3, 4])
    assert cache.find([1, 2, 3, 4, 5]) == table


def test_who_has_been_cached_for_longest_goes_first(make: Any) -> None:
    cache = make(4, 4)
    a, b = filled(cache, [1] * 4), filled(cache, [2] * 4)
    cache.release(b)
    cache.release(a)
    cache.share(b)  # somebody uses b again
    cache.release(b)
    assert cache.counts() == (2, 2, 0)
    assert cache.find([1] * 5) == a, "to look for something changes nothing"
    held = cache.allocate(3)
    assert a[0] in held
    assert cache.find([1] * 5) == [], "its content has gone with it"
    assert cache.find([2] * 5) == b


def test_the_tail_goes_before_the_head(make: Any) -> None:
    cache = make(3, 4)
    tokens = list(range(12))
    table = filled(cache, tokens)
    cache.release(table)
    for left in (2, 1, 0):
        cache.allocate(1)
        assert cache.find([*tokens, 99]) == table[:left]


def test_a_tail_without_its_head_is_not_found(make: Any) -> None:
    cache = make(4, 4)
    first = filled(cache, [1] * 4)
    second = cache.allocate(2)  # of a request that began before the first one was done
    cache.register(second, [1] * 8)
    assert cache.find([1] * 9) == [first[0], second[1]]
    cache.release(first)
    assert first[0] in cache.allocate(2)
    assert cache.find([1] * 9) == []


def test_two_caches_are_two(make: Any) -> None:
    first, second = make(4, 4), make(4, 4)
    filled(first, [1] * 8)
    assert second.find([1] * 9) == []
    assert second.counts() == (4, 0, 0)


def test_what_was_evicted_can_be_computed_again(make: Any) -> None:
    cache = make(2, 4)
    for _ in range(3):
        for tokens in ([1] * 8, [2] * 8):
            table = filled(cache, tokens)
            assert cache.find([*tokens, 9]) == table
            cache.release(table)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_ever_reads_another_text(make: Any, seed: int) -> None:
    draw = random.Random(seed)
    num_blocks, size = draw.choice([6, 12, 30]), 4
    cache = make(num_blocks, size)
    memory: list[list[Any]] = [[None] * size for _ in range(num_blocks)]
    running: list[tuple[list[int], list[int]]] = []  # table, tokens
    hits = 0
    for _ in range(600):
        if running and draw.random() < 0.5:
            table, _tokens = running.pop(draw.randrange(len(running)))
            cache.release(table)
        else:
            tokens = [draw.choice([0, 0, 1]) for _ in range(draw.randint(1, 4 * size))]
            found = cache.find(tokens)
            assert len(found) * size < len(tokens)
            cache.share(found)
            more = cache.allocate(-(-len(tokens) // size) - len(found))
            if more is None:
                cache.release(found)
                continue
            table = [*found, *more]
            hits += len(found)
            for p in range(len(found) * size, len(tokens)):
                memory[table[p // size]][p % size] = tuple(tokens[: p + 1])
            cache.register(table, tokens)
            running.append((table, tokens))
        for table, tokens in running:
            for p in range(len(tokens)):
                assert memory[table[p // size]][p % size] == tuple(tokens[: p + 1]), "somebody else's text"
        owned = {block for table, _tokens in running for block in table}
        free, cached, counted = cache.counts()
        assert counted == len(owned)
        assert free + cached + counted == num_blocks
    assert hits > 10
