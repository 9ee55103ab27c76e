"""Exercise 14.2: the arithmetic of bandwidth, with the numbers of an H200 and the 1B shape."""

from __future__ import annotations

import pytest
from conftest import Exercise
from tiny_vllm import Engine, SamplingParams


def test_rows_are_those_that_the_engine_counts(exercise: Exercise) -> None:
    rows = exercise.python("step_cost.py").rows_computed
    assert rows(5, 32, cached=True) == 36
    assert rows(5, 32, cached=False) == 656
    assert rows(7, 1, cached=True) == rows(7, 1, cached=False) == 7
    engine = Engine(device="cpu", enable_prefix_caching=False)
    for prompt, answer in ((3, 5), (20, 2)):
        before = engine.metrics()["num_computed_tokens"]
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        engine.generate([list(range(100, 100 + prompt))], params)
        assert rows(prompt, answer, cached=True) == engine.metrics()["num_computed_tokens"] - before


def test_bytes_of_a_token(exercise: Exercise) -> None:
    kv_bytes = exercise.python("step_cost.py").kv_bytes
    assert kv_bytes(30, 3, 64) == 23_040
    assert kv_bytes(16, 8, 64) == 32_768


def test_what_takes_longer_decides(exercise: Exercise) -> None:
    module = exercise.python("step_cost.py")
    h200, model = module.Device(4354e9, 673e12), module.Model(1_235_814_400, 32_768)
    assert module.step_seconds(h200, model, [0]) == pytest.approx(0.5677e-3, rel=1e-3)
    assert module.step_seconds(h200, model, [1024] * 64) == pytest.approx(1.0609e-3, rel=1e-3)
    assert module.step_seconds(h200, model, [0] * 1000) == pytest.approx(3.6726e-3, rel=1e-3)
    assert module.step_seconds(h200, model, [100, 300]) == module.step_seconds(h200, model, [200, 200])


@pytest.mark.parametrize(("context", "most"), [(0, 154), (128, 209), (256, 325), (600, None), (4096, None)])
def test_more_decodes_cost_nothing_up_to_a_point(exercise: Exercise, context: int, most: int | None) -> None:
    module = exercise.python("step_cost.py")
    h200, model = module.Device(4354e9, 673e12), module.Model(1_235_814_400, 32_768)
    assert module.most_decodes(h200, model, context) == most
