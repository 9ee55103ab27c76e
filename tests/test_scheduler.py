"""Both schedulers, driven without a model by the `World` of scheduler_world.py, which checks each step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import World, ceil_div
from tiny_vllm._core import Request, StepPlan
from tiny_vllm.errors import InternalError, InvalidRequestError

# --- Anything at all ---


@st.composite
def worlds(draw: st.DrawFn) -> World:
    max_model_len = draw(st.sampled_from([2, 10, 30, 60, 60, 60]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunked = draw(st.booleans()) or draw(st.booleans())
    budget = draw(st.integers(1, 24))
    return World(
        policy=draw(st.sampled_from(["continuous", "continuous", "static"])),
        num_blocks=ceil_div(draw(st.sampled_from([2, 16, 24, 32, 48, 48, 64, 90])), block_size),
        block_size=block_size,
        max_num_seqs=draw(st.sampled_from([1, 3, 6, 6])),
        budget=budget if chunked else max_model_len + budget - 1,
        max_model_len=max_model_len,
        prefix_caching=draw(st.booleans()) or draw(st.booleans()),
        chunked=chunked,
        constant_hash=draw(st.sampled_from([None, None, 0])),
        stop_chance=draw(st.sampled_from([0.0, 0.0, 0.2])),
        vocab=draw(st.sampled_from([1, 2, 1000])),
    )


@dataclass(frozen=True)
class Plan:
    prompt: list[int]
    max_tokens: int
    n: int
    salt: int
    read_prefix_cache: bool
    delay: int  # steps after the request before it
    abort_after: int | None  # steps
    priority: int = 0


@st.composite
def requests(draw: st.DrawFn, priorities: tuple[int, ...] = (0,)) -> Plan:
    base = [i % 3 for i in range(48)]  # prompts have beginnings in common, and blocks of equal tokens
    prompt = base[: draw(st.sampled_from([0, 1, 8, 12, 16, 24, 40]))]
    prompt += draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
    return Plan(
        prompt=prompt,
        max_tokens=draw(st.sampled_from([1, 2, 8, 20, 30])),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        salt=draw(st.sampled_from([0, 0, 0, 1])),
        read_prefix_cache=draw(st.sampled_from([True, True, False])),
        delay=draw(st.sampled_from([0, 0, 1, 5])),
        abort_after=draw(st.sampled_from([None, None, None, None, None, 0, 1, 2, 7])),
        priority=draw(st.sampled_from(priorities)),
    )


def fits(world: World, plan: Plan) -> bool:
    capacity = min(world.max_model_len, world.num_blocks * world.block_size)
    total = min(len(plan.prompt) + plan.max_tokens, capacity)
    worst_case = plan.n * ceil_div(total, world.block_size)
    return (
        len(plan.prompt) < capacity
        and plan.n <= world.max_num_seqs
        and (world.policy == "continuous" or worst_case <= world.num_blocks)
    )


def play(world: World, plans: list[Plan]) -> list[tuple[str, int]]:
    """Runs it all. Returns the sequences that were to finish, every one of which did."""
    aborts: dict[int, list[str]] = {}
    expected: list[tuple[str, int]] = []
    for i, plan in enumerate(plans):
        for _ in range(plan.delay):
            if world.scheduler.has_unfinished():
                world.step()
            for name in aborts.pop(world.steps, []):
                world.abort(name)
        options = {"n": plan.n, "cache_salt": plan.salt, "read_prefix_cache": plan.read_prefix_cache}
        options["priority"] = plan.priority
        if not fits(world, plan):
            with pytest.raises(InvalidRequestError):
                world.add(str(i), plan.prompt, plan.max_tokens, **options)
            continue
        world.add(str(i), plan.prompt, plan.max_tokens, **options)
        if plan.abort_after is None:
            expected += [(str(i), index) for index in range(plan.n)]
        else:
            aborts.setdefault(world.steps + plan.abort_after, []).append(str(i))
    for _ in range(8):
        for names in [aborts.pop(step) for step in sorted(aborts) if step <= world.steps]:
            for name in names:
                world.abort(name)
        if world.scheduler.has_unfinished():
            world.step()
    for names in aborts.values():
        for name in names:
            world.abort(name)
    world.run()
    assert set(expected) <= set(world.finished)
    return expected


@settings(max_examples=400, deadline=None)
@given(world=worlds(), plans=st.lists(requests(), min_size=4, max_size=10))
def test_random_traffic(world: World, plans: list[Plan]) -> None:
    play(world, plans)
    assert world.admitted == sorted(world.admitted, key=int), "first come, first admitted"
    # A sequence demands a block at each block edge and for one copy, and never twice for the same place.
    # A demand is met by at most one preemption, or by more where siblings own no block alone.
    demands = sum(p.n * (ceil_div(p.max_tokens, world.block_size) + (p.n > 1)) for p in plans)
    victims = 1 if all(p.n == 1 for p in plans) else world.max_num_seqs
    assert world.preemptions <= demands * victims


@settings(max_examples=300, deadline=None)
@given(world=worlds(), plans=st.lists(requests((0, -1, 5, 5)), min_size=4, max_size=10))
def test_random_traffic_with_priorities(world: World, plans: list[Plan]) -> None:
    """All that holds at any time holds, and everybody ends."""
    play(world, plans)


@settings(max_examples=150, deadline=None)
@given(world=worlds(), plans=st.lists(requests().filter(lambda p: p.n == 1), min_size=2, max_size=8))
def test_an_admission_is_not_followed_by_a_preemption(world: World, plans: list[Plan]) -> None:
    """One block for each running sequence stays free, so block_size steps are safe."""
    step = world.step

    def checked_step() -> StepPlan:
        last_admission = world.last_admission
        plan = step()
        if plan.preempted:
            assert world.steps > last_admission + world.block_size
        return plan

    world.step = checked_step  # type: ignore[method-assign]
    play(world, plans)


# --- Lengths around a block edge (B20) ---


@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("spare", [0, -1])
def test_b20_block_edges(policy: str, prefix_caching: bool, spare: int) -> None:
    for prompt in (1, 15, 16, 17, 31, 32, 33, 48):
        for max_tokens in (1, 2, 15, 16, 17, 18):
            num_blocks = ceil_div(prompt + max_tokens, 16) + spare
            if num_blocks == 0:
                continue
            world = World(policy, num_blocks=num_blocks, prefix_caching=prefix_caching)
            if prompt + 1 > num_blocks * 16:
                message = f"{prompt} tokens.* {num_blocks * 16} .*{num_blocks} blocks"
                with pytest.raises(InvalidRequestError, match=message):
                    world.add("a", prompt, max_tokens)
                continue
            for _ in range(2):  # the second time on what the first has left in the cache
                world.finished.clear()
                request = world.add("a", prompt, max_tokens)
                world.run()
                assert request.num_tokens == min(prompt + max_tokens, num_blocks * 16)
            assert request.num_cached_tokens == ((prompt - 1) // 16 * 16 if prefix_caching else 0)


# --- Recycled blocks and collisions (B21, B22) ---


def test_b21_a_recycled_block_is_a_miss() -> None:
    world = World(num_blocks=4)
    text = list(range(32))
    world.add("a", text, 1)
    world.run()
    assert world.add("again", text, 1).num_cached_tokens == -1
    world.run()
    assert world.blocks.stats["hit_tokens"] == 16, "the last block is computed for its logits"
    world.add("b", [1000 + i for i in range(63)], 1)
    world.run()
    hits = world.blocks.stats["hit_tokens"]
    third = world.add("third", text, 1)
    world.run()
    assert third.num_cached_tokens == 0
    assert world.blocks.stats["hit_tokens"] == hits
    assert world.blocks.stats["queried_tokens"] == 32 + 32 + 63 + 32


@pytest.mark.parametrize("constant_hash", [None, 0])
def test_b22_equal_blocks_after_different_pasts(constant_hash: int | None) -> None:
    world = World(constant_hash=constant_hash)
    x, y, z = [1] * 16, [2] * 16, [3] * 16
    hits = {}
    for name, prompt, salt in [
        ("xy", x + y, 0),
        ("zy", z + y, 0),
        ("y", y, 0),
        ("xyz", x + y + z, 0),
        ("yxyz", y + x + y + z, 0),
        ("salted", x + y + z, 1),
        ("salted again", x + y + z, 1),
    ]:
        request = world.add(name, prompt, 3, cache_salt=salt)
        world.run()
        hits[name] = request.num_cached_tokens
    assert hits == {"xy": 0, "zy": 0, "y": 0, "xyz": 32, "yxyz": 16, "salted": 0, "salted again": 32}


# --- Prefix caching in the schedule ---


def test_requests_admitted_together_do_not_share_unwritten_blocks() -> None:
    world = World(budget=1000)
    text = list(range(40))
    a, b = world.add("a", text), world.add("b", text)
    plan = world.scheduler.schedule()
    assert plan.admitted == [a, b]
    assert set(a.block_table).isdisjoint(b.block_table)
    assert world.blocks.find_prefix(text) == [], "scheduled is not written"
    world.scheduler.commit(plan)
    assert world.blocks.find_prefix(text) == a.block_table[:2]


def test_a_common_prompt_is_computed_once() -> None:
    world = World(num_blocks=256, max_num_seqs=16, budget=128)
    common = list(range(480))
    for i in range(16):
        world.add(str(i), [*common, 1000 + i], 1)
    world.run()
    assert sum(world.computed.values()) == 481 + 15 * 1
    assert world.blocks.stats["hit_tokens"] == 15 * 480
    # The oldest was alone at work, in steps of 128, 128, 128 and 97; then 15 others had one token each to do.
    assert world.first_token[("0", 0)] == 4
    assert world.first_token[("15", 0)] == 5


def test_only_the_same_text_is_waited_for() -> None:
    world = World(budget=320)
    text = list(range(40))
    world.add("another", 40)
    world.add("salted", text, cache_salt=1)
    world.add("plain", text)
    world.add("uncached", text, read_prefix_cache=False)
    world.add("again", text)
    world.step()
    assert {name: count for (name, _), count in world.log[-1].items()} == {
        "another": 40,
        "salted": 40,
        "plain": 40,
        "uncached": 40,
    }
    world.step()
    assert world.log[-1][("again", 0)] == 8


def test_late_hits_count_as_cached_tokens() -> None:
    world = World(budget=32)
    text = list(range(100))
    world.add("a", text, 1)
    world.step()
    b = world.add("b", [*text, 7], 1)
    world.run()
    assert b.num_cached_tokens == 96
    assert world.computed[("b", 0)] == 101 - 96


def test_prompt_logprobs_read_nothing_from_the_cache() -> None:
    world = World()
    text = list(range(40))
    world.add("a", text, 1)
    world.run()
    request = world.add("b", text, 1, read_prefix_cache=False)
    world.run()
    assert request.num_cached_tokens == 0
    assert world.computed[("b", 0)] == 40
    assert world.blocks.stats["queried_tokens"] == 40, "only the first one asked"


def test_what_is_found_is_not_evicted_by_the_same_admission() -> None:
    world = World(num_blocks=4, block_size=4)
    text = list(range(8))
    world.add("a", text, 1)
    world.run()
    world.add("b", [*text, *range(50, 56)], 1)  # 2 cached blocks and 2 others, all that there are
    world.run()
    assert world.blocks.stats["hit_tokens"] == 8
    assert world.blocks.stats["evictions"] == 0


# --- n > 1 (B23) ---


@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize(("prompt", "copies"), [(20, 2), (16, 0)])
def test_b23_forks_copy_a_half_filled_block(policy: str, prompt: int, copies: int) -> None:
    world = World(policy)
    for name in ("a", "b"):
        world.add(name, prompt, 20, n=3)
    world.run()
    assert set(world.finished) == {(name, index) for name in "ab" for index in range(3)}
    assert world.copies == 2 * copies
    assert world.blocks.stats["copies"] == 2 * copies


@pytest.mark.parametrize("vocab", [1, 1000])
def test_b23_forks_in_a_small_pool(vocab: int) -> None:
    world = World(num_blocks=7, vocab=vocab)
    for name in ("a", "b"):
        world.add(name, 20, 30, n=3)
    world.run()
    assert set(world.finished) == {(name, index) for name in "ab" for index in range(3)}
    assert world.preemptions > 0


def test_n_sequences_count_for_n() -> None:
    world = World(max_num_seqs=4, budget=8)
    world.add("a", 20, 4, n=3)
    b = world.add("b", 4, 4, n=2)
    while ("a", 0) not in world.first_token:
        world.step()
        assert b.state == "waiting", "3 + 2 sequences are more than 4, before the fork as well as after"
    world.run()
    with pytest.raises(InvalidRequestError, match=r"n is 5.*max_num_seqs, which is 4"):
        world.add("c", 4, 4, n=5)


# --- What can never fit (B24) ---


def test_b24_what_can_never_fit_is_refused_and_harms_nobody() -> None:
    world = World(num_blocks=10)
    world.add("a", 50)
    with pytest.raises(InvalidRequestError, match=r"has 200 tokens .* room for 160 .* 10 blocks of 16"):
        world.add("b", 200)
    world.add("c", 50)
    world.run()
    assert set(world.finished) == {("a", 0), ("c", 0)}
    d = world.add("d", 100, 100)
    assert d.max_total_tokens == 160
    world.run()
    assert d.num_tokens == 160
    assert world.preemptions == 0
    with pytest.raises(InvalidRequestError, match="at least 1 is needed"):
        world.add("empty", [])


def test_b17_prompts_as_long_as_the_model() -> None:
    world = World(max_model_len=64)
    for prompt, tokens in [(62, 2), (63, 1)]:
        request = world.add(str(prompt), prompt, 1000)
        world.run()
        assert request.num_output_tokens == tokens
    for prompt in (64, 65):
        with pytest.raises(InvalidRequestError, match=f"{prompt} tokens .* 64 .max_model_len is 64"):
            world.add("x", prompt, 1)


def test_static_batching_refuses_what_it_cannot_set_aside() -> None:
    world = World("static", num_blocks=8, block_size=4)
    with pytest.raises(InvalidRequestError, match=r"n = 3 .* up to 12 tokens need 9 blocks; .* has 8"):
        world.add("a", 4, 8, n=3)
    world.add("b", 4, 8, n=2)
    world.run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 2**40}, "max_num_seqs is 1099511627776"),
        ({"max_model_len": -1}, "max_model_len is -1"),
        ({"chunked": False, "budget": 63, "max_model_len": 64}, "is 63, less than max_model_len .64"),
        ({"policy": "magic"}, 'scheduler is "magic"'),
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, int | str | bool], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        World(**changes)  # type: ignore[arg-type]


# --- Long and short (B25) ---


@pytest.mark.parametrize("longs", [1, 3])
def test_b25_a_long_prompt_stops_nobody(longs: int) -> None:
    world = World(num_blocks=2048)
    world.add("R", 5, 1000)
    world.step()
    for i in range(longs):
        world.add(f"L{i}", 4000, 2)
    world.step()
    world.step()
    world.add("S", 5, 1)
    start = world.steps
    world.run()
    assert world.first_token[("S", 0)] == start + 1
    life_of_r = world.log[: world.finished[("R", 0)]]
    assert all(("R", 0) in counts for counts in life_of_r), "a token in every step"
    left = world.budget - 1
    assert world.first_token[("L0", 0)] <= 2 + ceil_div(4000, left // 2)


def test_b25_short_prompts_do_not_hold_up_a_long_one() -> None:
    world = World(num_blocks=2048, max_num_seqs=64)
    world.add("L", 4000, 2)
    for i in range(200):
        world.add(f"S{i}", 5, 30)
        if i % 2:
            world.step()
    world.run()
    assert world.first_token[("L", 0)] <= ceil_div(4000, ceil_div(64, 8))
    assert set(world.finished) == {("L", 0)} | {(f"S{i}", 0) for i in range(200)}


@pytest.mark.parametrize("budget", [2, 3, 16, 64])
def test_the_bound_of_the_oldest_prefill_holds_beside_any_number_of_decodes(budget: int) -> None:
    world = World(num_blocks=4096, max_num_seqs=128, budget=budget)
    for i in range(96):
        world.add(f"D{i}", 1, 400)
    while len(world.first_token) < 96:
        world.step()
    start = world.steps
    world.add("L", 300, 2)
    for i in range(10):
        world.add(f"S{i}", 20, 2)
    while ("L", 0) not in world.first_token:
        world.step()
    assert world.steps - start <= ceil_div(300, ceil_div(budget, 8))


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_more_decodes_than_budget_take_turns(policy: str) -> None:
    world = World(policy, max_num_seqs=10, budget=4)
    for i in range(10):
        world.add(str(i), 1, 40)
    while len(world.first_token) < 10:
        world.step()
    start = world.steps
    while not world.finished:
        world.step()
    for i in range(10):
        turns = [step for step, counts in enumerate(world.log) if step >= start and (str(i), 0) in counts]
        assert max(b - a for a, b in pairwise(turns)) <= 3  # ceil(10 / 4)
    assert all(sum(counts.values()) == 4 for counts in world.log[start:])


def test_an_unused_prefill_share_goes_to_decodes() -> None:
    world = World(max_num_seqs=8, budget=8)
    for i in range(9):  # the ninth waits for a seat, so prefill work is pending all the time
        world.add(str(i), 1, 40)
    while len(world.first_token) < 8:
        world.step()
    assert world.step().num_tokens == 8


def test_without_chunks_a_prompt_is_computed_whole() -> None:
    world = World(budget=64, max_model_len=64, chunked=False)
    for name, prompt in [("a", 40), ("b", 30), ("c", 20), ("d", 63)]:
        world.add(name, prompt, 3)
    world.step()
    assert world.log[-1] == {("a", 0): 40}, "b does not fit beside a, and c does not overtake b"
    world.step()
    assert world.log[-1] == {("a", 0): 1, ("b", 0): 30, ("c", 0): 20}
    world.run()
    assert max(sum(counts.values()) for counts in world.log) <= 64


# --- Memory: admission, growth, preemption ---


def test_admission_keeps_a_block_for_each_running_sequence() -> None:
    world = World(num_blocks=8, block_size=4, budget=64)
    a = world.add("a", 8, 8)
    b = world.add("b", 8, 8)
    c = world.add("c", 8, 8)
    world.step()
    # a and b hold 2 blocks each; with c there would be 2 free blocks for 3 sequences.
    assert [a.state, b.state, c.state] == ["running", "running", "waiting"]
    world.run()
    assert world.preemptions == 0


def test_the_newest_is_preempted_and_returns_to_its_place() -> None:
    world = World(num_blocks=6, block_size=4, budget=64, prefix_caching=False)
    a = world.add("a", 7, 17)
    b = world.add("b", 7, 17)
    while not world.preemptions:
        world.step()
    assert (a.state, b.state) == ("running", "waiting")
    assert (b.num_computed_tokens, b.block_table, b.num_preemptions) == (0, [], 1)
    c = world.add("c", 1, 1)
    assert world.scheduler.waiting == [b, c]
    world.step()
    assert c.state == "waiting", "b comes first, though c would fit"
    world.run()
    assert a.num_preemptions == 0
    assert world.finished[("a", 0)] < world.finished[("b", 0)]


def test_the_oldest_is_never_preempted() -> None:
    world = World(num_blocks=12, block_size=2, budget=16, max_num_seqs=4)
    requests = [world.add(str(i), 3, 7) for i in range(4)]
    world.run()
    assert requests[0].num_preemptions == 0
    assert world.preemptions > 0


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    world = World(num_blocks=6, block_size=4, budget=64)
    world.add("a", 7, 7)
    b = world.add("b", 7, 17)
    world.run()
    # Preempted with 12 of 13 tokens computed, in 3 blocks: its last one is taken by a, two wait for it.
    assert b.num_preemptions == 1
    assert world.computed[("b", 0)] == 12 + (13 - 8) + 10
    # But nobody else has saved it any work.
    assert b.num_cached_tokens == 0
    assert world.blocks.stats["hit_tokens"] == 0
    assert world.blocks.stats["queried_tokens"] == 14


def test_hits_are_counted_once_for_each_request() -> None:
    world = World(num_blocks=14, block_size=4, budget=64)
    world.add("oldest", 20, 36)  # fills the pool in the end
    text = list(range(9))
    a, b = world.add("a", text, 20), world.add("b", text, 20)
    while ("oldest", 0) not in world.finished:
        world.step()
        assert (a.num_cached_tokens, b.num_cached_tokens) in {(0, 0), (0, 8)}
    assert (a.state, b.state) == ("waiting", "waiting")
    assert world.blocks.find_prefix(text) == []
    world.step()
    assert world.scheduler.running == [a, b]
    assert b.num_computed_tokens == 0, "it waits for a to compute the text they have in common, as before"
    world.run()
    assert b.num_cached_tokens == 8
    assert world.blocks.stats["hit_tokens"] == 8


# --- Priorities ---


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_the_smaller_priority_number_is_admitted_first(policy: str) -> None:
    world = World(policy, max_num_seqs=1)
    for name, priority in (("a", 3), ("b", -1), ("c", 3), ("d", 0), ("e", -1)):
        world.add(name, 5, max_tokens=2, priority=priority)
    world.run()
    assert world.admitted == ["b", "e", "d", "a", "c"]


def test_a_seat_is_taken_from_who_matters_least() -> None:
    world = World(max_num_seqs=2)
    low, lower = (
        world.add("low", 20, max_tokens=30, priority=1),
        world.add("lower", 20, max_tokens=30, priority=2),
    )
    world.step()
    world.step()
    urgent = world.add("urgent", 20, max_tokens=3)
    plan = world.step()
    assert (plan.preempted, plan.admitted) == ([lower], [urgent])
    assert world.scheduler.running == [urgent, low]
    equal = world.add("equal", 20, max_tokens=3, priority=1)
    assert world.step().preempted == []
    assert equal.state == "waiting", "nobody gives way to an equal"
    world.run()
    assert lower.num_preemptions == 1
    order = [name for name, _ in sorted(world.finished, key=world.finished.__getitem__)]
    assert (order[0], order[-1]) == ("urgent", "lower")


def test_blocks_are_taken_only_if_that_is_enough() -> None:
    """A request of 6 blocks, and one free block to spare for each of two that run: 8 of 10."""
    world = World(num_blocks=10, block_size=4, prefix_caching=False)
    first, last = world.add("first", 16, max_tokens=8), world.add("last", 8, max_tokens=8, priority=9)
    world.step()
    big = world.add("big", 23, max_tokens=1, priority=1)
    plan = world.step()
    assert not plan.preempted, "4 blocks are free, and 2 more would not do"
    assert big.state == "waiting"
    world.run()
    assert last.num_preemptions == 0

    world = World(num_blocks=12, block_size=4, prefix_caching=False)
    first, last = world.add("first", 8, max_tokens=8), world.add("last", 16, max_tokens=8, priority=9)
    world.step()
    big = world.add("big", 23, max_tokens=1, priority=1)
    plan = world.step()
    assert plan.preempted == [last]
    assert big in plan.admitted
    assert first.num_preemptions == 0
    world.run()


def test_blocks_that_only_victims_share_come_free_with_the_last_of_them() -> None:
    world = World(num_blocks=40, block_size=4)
    text = list(range(96))
    for name in "ab":
        world.add(name, [*text, ord(name)], max_tokens=40, priority=5)
    for _ in range(4):
        world.step()
    urgent = world.add("urgent", 80, max_tokens=1)
    plan = world.step()
    assert [r.id for r in plan.preempted] == ["b", "a"]
    assert plan.admitted == [urgent]
    world.run()


def test_what_is_found_in_a_victims_blocks_counts_once() -> None:
    """The urgent prompt begins like the victim's. Without the victim those blocks are free, or found."""
    world = World(num_blocks=20, block_size=4)
    text = list(range(40))
    world.add("first", 20, max_tokens=16)
    victim = world.add("victim", [*text, 99], max_tokens=8, priority=5)
    for _ in range(4):
        world.step()
    urgent = world.add("urgent", [*text, *range(200, 224)], max_tokens=2)
    for _ in range(60):
        if urgent.state != "waiting":
            break
        if world.step().preempted:
            assert urgent.state == "running", "nobody is preempted in vain"
    world.run()
    assert victim.num_preemptions <= 1


def test_what_others_hold_already_need_not_be_free() -> None:
    """The beginning of the urgent prompt is in blocks of a running request."""
    world = World(num_blocks=12, block_size=4)
    text = list(range(16))
    world.add("one", text, max_tokens=8)
    low = world.add("low", 8, max_tokens=8, priority=9)
    world.step()
    world.step()
    urgent = world.add("urgent", [*text, 99], max_tokens=1)
    assert world.step().admitted == [urgent]
    assert low.num_preemptions == 0
    world.run()


# --- Static batching ---


def test_static_batching_leaves_empty_seats() -> None:
    world = World("static", max_num_seqs=2, budget=8)
    world.add("long", 10, 9)
    world.add("short", 4, 2)
    late = world.add("late", 3, 2)
    while ("long", 0) not in world.finished:
        assert late.state == "waiting"
        world.step()
    # Steps of 8 and 6 prompt tokens, then lockstep. The short one ends, and its seat stays empty.
    assert world.log[:4] == [
        {("long", 0): 8},
        {("long", 0): 2, ("short", 0): 4},
        {("long", 0): 1, ("short", 0): 1},
        {("long", 0): 1},
    ]
    world.run()
    assert world.finished[("late", 0)] == world.finished[("long", 0)] + 2


def test_static_batching_sets_the_worst_case_aside() -> None:
    world = World("static", num_blocks=4, block_size=4)
    world.add("a", 2, 9)  # 3 blocks at most
    b = world.add("b", 2, 3)  # 2 blocks
    world.step()
    assert b.state == "waiting"
    world.run()


# --- Abort, misuse ---


@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("steps", [0, 1, 4, 5, 7])
def test_abort_in_any_state_gives_all_blocks_back(policy: str, steps: int) -> None:
    world = World(policy, budget=8)
    request = world.add("a", 30, 8, n=2)  # 4 steps of prefill, then two decodes
    for _ in range(steps):
        world.step()
    assert request.state == ("running" if steps else "waiting")
    world.abort("a")
    assert world.blocks.owned_blocks == 0
    assert not world.scheduler.has_unfinished()
    world.add("b", 30, 8)
    world.run()


def test_abort_of_a_preempted_request() -> None:
    world = World(num_blocks=6, block_size=4, budget=64)
    world.add("a", 7, 17)
    world.add("b", 7, 17)
    while not world.preemptions:
        world.step()
    world.abort("b")
    world.run()
    assert set(world.finished) == {("a", 0)}


def test_misuse_is_reported() -> None:
    world = World()
    request = world.add("a", 20, 8, n=2)
    with pytest.raises(InternalError, match="in the queues 0 times"):
        world.scheduler.remove(Request("stranger", [1], 1))
    with pytest.raises(InternalError, match="before or after the end of its prompt"):
        world.scheduler.fork(request, 1)
    plan = world.scheduler.schedule()
    world.scheduler.commit(plan)
    with pytest.raises(InternalError, match="has changed"):
        world.scheduler.commit(plan)
    with pytest.raises(InternalError, match="no child"):
        world.scheduler.fork(request, 0)
    with pytest.raises(InternalError, match="is not new"):
        world.scheduler.add(request)
    world.scheduler.remove(request)
    with pytest.raises(InternalError, match="0 times"):
        world.scheduler.remove(request)
    assert world.blocks.owned_blocks == 0
