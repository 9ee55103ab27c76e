"""config.json: what each family's fields mean, against hand-written expectations and against transformers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import tiny_models
from tiny_vllm import _core
from tiny_vllm.errors import ModelLoadError

ABSENT = tiny_models.ABSENT
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


def of_family(family: str, /, **changes: Any) -> dict[str, Any]:
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = {**LLAMA, "model_type": family, "architectures": [f"{architecture}ForCausalLM"], **changes}
    return {k: v for k, v in config.items() if v is not ABSENT}


def parse(config: dict[str, Any] | str) -> dict[str, Any]:
    text = config if isinstance(config, str) else json.dumps(config)
    parsed: dict[str, Any] = _core.parse_config(text, "folder/config.json").as_dict()
    return parsed


def parse_llama(**changes: Any) -> dict[str, Any]:
    return parse(of_family("llama", **changes))


def test_supported_model_types() -> None:
    assert _core.supported_model_types() == ["llama", "mistral", "qwen2", "qwen3"]


# ---- whole files of well-known models --------------------------------------------------------------------


def test_llama_3_2_1b() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    }
    parsed = parse(config)
    assert parsed.pop("rms_norm_eps") == pytest.approx(1e-5)  # a float32
    assert parsed == {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "activation": "silu",
        "rope": {
            "type": "llama3",
            "theta": 500000.0,
            "factor": 32.0,
            "original_max_position": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "attention_factor": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,
        },
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": [0] * 16,
    }


def test_mistral_7b_v01() -> None:
    parsed = parse(
        of_family(
            "mistral",
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=None,
            max_position_embeddings=32768,
            sliding_window=4096,
            rope_theta=10000.0,
            vocab_size=32000,
        )
    )
    assert (parsed["head_dim"], parsed["num_kv_heads"]) == (128, 8)
    assert parsed["sliding_window"] == [4096] * 32


def test_qwen_2_5_0_5b() -> None:
    parsed = parse(
        of_family(
            "qwen2",
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            max_window_layers=24,
            rope_theta=1000000.0,
            sliding_window=32768,
            tie_word_embeddings=True,
            use_mrope=False,
            use_sliding_window=False,
            vocab_size=151936,
        )
    )
    assert parsed["head_dim"] == 64
    assert (parsed["qkv_bias"], parsed["o_bias"], parsed["qk_norm"]) == (True, False, False)
    assert parsed["sliding_window"] == [0] * 24
    assert parsed["rope"]["theta"] == 1e6


def test_qwen3_0_6b() -> None:
    parsed = parse(
        of_family(
            "qwen3",
            attention_bias=False,
            head_dim=128,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            max_window_layers=28,
            use_sliding_window=False,
            tie_word_embeddings=True,
            vocab_size=151936,
        )
    )
    assert (parsed["head_dim"], parsed["qk_norm"], parsed["qkv_bias"]) == (128, True, False)


# ---- one rule at a time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "given", "expected"),
    [
        ("llama", ABSENT, 16),
        ("llama", None, 16),
        ("llama", 24, 24),
        ("mistral", ABSENT, 16),
        ("mistral", None, 16),
        ("qwen2", ABSENT, 16),
        ("qwen2", 32, 32),
        ("qwen3", ABSENT, 128),
        ("qwen3", None, 16),
        ("qwen3", 64, 64),
    ],
)
def test_head_dim(model_type: str, given: Any, expected: int) -> None:
    assert parse(of_family(model_type, head_dim=given, num_key_value_heads=2))["head_dim"] == expected


@pytest.mark.parametrize(
    ("model_type", "heads", "given", "expected"),
    [
        ("llama", 4, ABSENT, 4),
        ("llama", 4, None, 4),
        ("llama", 4, 1, 1),
        ("mistral", 16, ABSENT, 8),
        ("mistral", 16, None, 16),
        ("qwen2", 64, ABSENT, 32),
        ("qwen2", 64, None, 64),
        ("qwen3", 64, ABSENT, 32),
    ],
)
def test_num_key_value_heads(model_type: str, heads: int, given: Any, expected: int) -> None:
    config = of_family(model_type, num_attention_heads=heads, num_key_value_heads=given, head_dim=16)
    assert parse(config)["num_kv_heads"] == expected


@pytest.mark.parametrize(
    ("model_type", "changes", "qkv", "o", "mlp"),
    [
        ("llama", {}, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False),
        ("llama", {"mlp_bias": True}, False, False, True),
        ("mistral", {"attention_bias": False}, False, False, False),
        ("qwen2", {}, True, False, False),
        ("qwen2", {"attention_bias": False}, True, False, False),
        ("qwen2", {"attention_bias": True}, True, False, False),
        ("qwen3", {"attention_bias": True}, True, True, False),
    ],
)
def test_biases(model_type: str, changes: dict[str, Any], qkv: bool, o: bool, mlp: bool) -> None:
    parsed = parse(of_family(model_type, num_key_value_heads=4, **changes))
    assert (parsed["qkv_bias"], parsed["o_bias"], parsed["mlp_bias"]) == (qkv, o, mlp)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {"sliding_window": None}, [0, 0, 0]),
        ("llama", {"sliding_window": 8, "use_sliding_window": False}, [0, 0, 0]),
        ("llama", {"layer_types": [FULL] * 3}, [0, 0, 0]),
        ("mistral", {}, [4096] * 3),
        ("mistral", {"sliding_window": None}, [0, 0, 0]),
        ("mistral", {"sliding_window": 8}, [8, 8, 8]),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING] * 3}, [8, 8, 8]),
        ("qwen2", {}, [0, 0, 0]),
        ("qwen2", {"sliding_window": 8}, [0, 0, 0]),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, [0, 0, 0]),  # from layer 28 on
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [0, 8, 8]),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8, 8, 8]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, [0, 0, 4096]),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}, [0, 0, 0]),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0,
             "layer_types": [SLIDING, FULL, SLIDING]},
            [8, 0, 8],
        ),
        ("qwen3", {"layer_types": [FULL] * 3}, [0, 0, 0]),
    ],
)  # fmt: skip
def test_sliding_windows(model_type: str, changes: dict[str, Any], expected: list[int]) -> None:
    assert parse(of_family(model_type, num_key_value_heads=4, **changes))["sliding_window"] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ABSENT, "silu"),
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_activations(name: Any, expected: str) -> None:
    assert parse_llama(hidden_act=name)["activation"] == expected


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_tie_word_embeddings(model_type: str) -> None:
    for given, expected in ((ABSENT, False), (None, False), (False, False), (True, True)):
        config = of_family(model_type, num_key_value_heads=4, tie_word_embeddings=given)
        assert parse(config)["tie_word_embeddings"] is expected


def test_names_without_effect_are_accepted() -> None:
    plain = parse_llama()
    harmless = {
        "pretraining_tp": 4, "attention_dropout": 0.1, "use_cache": False, "torch_dtype": "float16",
        "auto_map": {"AutoConfig": "x"}, "num_experts": 0, "use_mrope": False, "partial_rotary_factor": 1.0,
        "quantization_config": None, "logits_scaling": 1, "architectures": None,
    }  # fmt: skip
    assert parse_llama(**harmless) == plain
    assert parse_llama(architectures=["LLaMAForCausalLM"]) == plain
    assert parse_llama(architectures=[]) == plain
    assert parse_llama(architectures=ABSENT) == plain


# ---- rope ------------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(**changes: Any) -> dict[str, Any]:
    parsed: dict[str, Any] = parse_llama(**changes)["rope"]
    return parsed


def test_rope_defaults() -> None:
    assert (rope()["type"], rope()["theta"]) == ("default", 10000.0)
    assert rope(rope_theta=None)["theta"] == 10000.0
    assert rope(rope_theta=500000)["theta"] == 500000.0
    assert rope(rope_scaling={}, rope_parameters=None) == rope()
    assert rope(rope_scaling={"rope_type": "default"}) == rope()
    assert rope(rope_parameters={"rope_type": "default", "rope_theta": 5e5})["theta"] == 5e5


def test_rope_old_and_new_spelling_mean_the_same() -> None:
    old = rope(rope_theta=5e5, rope_scaling=LLAMA3)
    assert old["type"] == "llama3"
    assert old["factor"] == 8.0
    legacy = {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}
    assert rope(rope_theta=5e5, rope_scaling=legacy) == old
    assert rope(rope_parameters={**LLAMA3, "rope_theta": 5e5}) == old
    assert rope(rope_theta=5e5, rope_parameters={**LLAMA3, "rope_theta": 5e5}) == old
    assert rope(rope_theta=5e5, rope_parameters=LLAMA3, rope_scaling=LLAMA3) == old


def test_rope_original_max_position() -> None:
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert rope(rope_scaling=YARN)["original_max_position"] == 64
    assert rope(rope_scaling=short, max_position_embeddings=512)["original_max_position"] == 512
    assert rope(rope_scaling=short, original_max_position_embeddings=128)["original_max_position"] == 128
    dynamic = rope(rope_scaling={"rope_type": "dynamic", "factor": 2}, max_position_embeddings=512)
    assert (dynamic["type"], dynamic["original_max_position"]) == ("dynamic", 512)


def test_yarn_parameters() -> None:
    assert rope(rope_scaling=YARN)["attention_factor"] == pytest.approx(1.1386294361119891, abs=1e-15)
    assert rope(rope_scaling={**YARN, "attention_factor": 0.5})["attention_factor"] == 0.5
    assert rope(rope_scaling={**YARN, "factor": 1})["attention_factor"] == 1.0
    both = rope(rope_scaling={**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0})
    ratio = (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert both["attention_factor"] == pytest.approx(ratio, abs=1e-15)
    assert rope(rope_scaling={**YARN, "mscale": 0.707}) == rope(rope_scaling=YARN)
    tuned = rope(rope_scaling={**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False})
    assert (tuned["beta_fast"], tuned["beta_slow"], tuned["truncate"]) == (16.0, 2.0, False)
    implied = rope(rope_scaling={**YARN, "factor": None}, max_position_embeddings=640)
    assert implied["factor"] == 10.0


# ---- refusals --------------------------------------------------------------------------------------------

BIG = 2**70
REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": ABSENT}, "model_type is missing; supported are llama, mistral, qwen2, qwen3"),
    ({"model_type": 7}, "model_type must be a string, found number 7"),
    (
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        r"model_type 'mixtral' \(architecture MixtralForCausalLM\) is not supported; supported are llama,",
    ),
    ({"model_type": "Llama"}, r"model_type 'Llama' .*supported are llama"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "it must be LlamaForCausalLM"),
    ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM' is not supported; for"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings, found string"),
    ({"hidden_size": ABSENT}, "hidden_size is missing"),
    ({"hidden_size": None}, "hidden_size is null"),
    ({"hidden_size": "64"}, 'hidden_size must be an integer, found string "64"'),
    ({"hidden_size": 64.0}, "hidden_size must be an integer, found number 64.0"),
    ({"hidden_size": True}, "hidden_size must be an integer, found boolean true"),
    ({"hidden_size": [64]}, "hidden_size must be an integer, found array"),
    ({"hidden_size": 0}, "hidden_size must be from 1 to 1048576, found 0"),
    ({"hidden_size": -64}, "hidden_size must be from 1 .*found -64"),
    ({"hidden_size": 2**63}, f"hidden_size must be from 1 .*found {2**63}"),
    ({"hidden_size": BIG}, "hidden_size must be an integer"),  # read as 1.18e21
    ({"intermediate_size": 2**21}, "intermediate_size must be from 1 to 1048576"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be from 1 to 4096"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers must be from 1 to 4096"),
    ({"num_attention_heads": 0}, "num_attention_heads must be from 1"),
    ({"vocab_size": 2**31}, "vocab_size must be from 1 to 2147483647"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be from 1"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings must be from 1"),
    ({"num_key_value_heads": 3}, r"heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
    ({"num_key_value_heads": 8}, "num_key_value_heads must be from 1 to 4, found 8"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be from 1 to 4, found 0"),
    ({"hidden_size": 66}, r"hidden_size \(66\) must be a multiple of num_attention_heads \(4\)"),
    ({"head_dim": 15}, r"head_dim \(15\) must be even"),
    ({"head_dim": -2}, "head_dim must be from 1 to 65536"),
    ({"num_attention_heads": 65536, "head_dim": 64}, "x head_dim .* is above 1048576"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be"),
    ({"rms_norm_eps": 2}, "rms_norm_eps must be"),
    ({"rms_norm_eps": 1e-50}, "rms_norm_eps must be"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number, found string"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported are silu"),
    ({"hidden_act": 1}, "hidden_act must be a string"),
    ({"attention_bias": 1}, "attention_bias must be true or false, found number 1"),
    ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false"),
    ({"sliding_window": 8}, "sliding_window = 8 is not supported for model_type 'llama'"),
    ({"layer_types": [FULL, SLIDING, FULL]}, "layer_types: layer 1 is sliding_attention, but"),
    ({"layer_types": [FULL]}, "layer_types has 1 entries for 3 layers"),
    ({"layer_types": [FULL, FULL, "linear_attention"]}, "layer_types: 'linear_attention' is not supported"),
    ({"layer_types": [1, 2, 3]}, "layer_types must be a list of strings, found number 1"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is not supported: only weights in BF16"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ({"num_experts": 8}, "num_experts = 8 is not supported"),
    ({"num_local_experts": 8}, "num_local_experts = 8 is not supported"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
    ({"embedding_multiplier": 12}, "embedding_multiplier = 12 is not supported"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder = true is not supported"),
    ({"vision_config": {}}, "vision_config is not supported"),
    ({"alibi": True}, "alibi = true is not supported"),
    ({"use_qk_norm": 1}, "use_qk_norm = 1 is not supported"),
    # rope
    ({"rope_theta": 0}, "rope_theta must be above 1"),
    ({"rope_theta": -1e4}, "rope_theta must be above 1"),
    ({"rope_theta": "1e4"}, "rope_theta must be a number"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
        "rope_type 'longrope' is not supported; supported are default, linear, dynamic, llama3, yarn",
    ),
    ({"rope_scaling": {"type": "su"}}, "rope_scaling.type 'su' is not supported"),
    ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "is 'linear', but .* 'yarn'"),
    ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters.rope_type 'mrope' is not supported"),
    ({"rope_scaling": {"rope_type": 1}}, "rope_scaling.rope_type must be a string"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor has no meaning for rope_type 'default'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor must be at least 1"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 1e9}}, "factor must be at least 1 and at most"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 1}}, "beta_fast has no meaning"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section has no meaning"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "rope_scaling.low_freq_factor is missing"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": None}}, "rope_scaling.high_freq_factor is missing"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, r"factor \(1\) must be above low_freq"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor must be above 0"),
    ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}, "must be from 1 to"),
    ({"rope_scaling": {**YARN, "factor": None}, "max_position_embeddings": 64}, "factor is missing"),
    ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor must be above 0"),
    ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, r"\(1\) must not be below beta_slow"),
    ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate must be true or false"),
    ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
    ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "has both rope_scaling and rope_parameters"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "is 1e\\+06, but rope_theta is 10000"),
    (
        {"rope_scaling": YARN, "original_max_position_embeddings": 128},
        "rope_scaling.original_max_position_embeddings is 64, but original_max_position_embeddings is 128",
    ),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 64}},
        r"rope_type 'dynamic' starts at max_position_embeddings \(2048\)",
    ),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2}, "needs head_dim above 2"),
    ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "a rope for each layer type is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED_FIELDS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_refused_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=r"^folder/config\.json: .*" + message):
        parse_llama(**changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "mistral",
            {"attention_bias": True},
            "attention_bias = true is not supported for model_type 'mistral'",
        ),
        ("mistral", {"mlp_bias": True}, "mlp_bias = true is not supported for model_type 'mistral'"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be from 1"),
        ("mistral", {"sliding_window": 8, "layer_types": [FULL] * 3}, "layer 0 is full_attention, but"),
        ("mistral", {"num_key_value_heads": ABSENT}, r"num_key_value_heads \(8, the family's default"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias = true is not supported"),
        ("qwen2", {"layer_types": [FULL, FULL, SLIDING]}, "layer 2 is sliding_attention, but"),
        ("qwen2", {"max_window_layers": -1}, None),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers must be from 0"),
        ("qwen3", {"head_dim": 33}, "must be even"),
    ],
)
def test_refused_for_a_family(model_type: str, changes: dict[str, Any], message: str | None) -> None:
    config = of_family(model_type, **{"num_key_value_heads": 4, **changes})
    if message is None:
        parse(config)
        return
    with pytest.raises(ModelLoadError, match=message):
        parse(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON: line 1, column 1"),
        ("[]", "must be a JSON object, found array"),
        ("null", "must be a JSON object, found null"),
        ("7", "must be a JSON object, found number"),
        ('{"model_type": "llama",}', "is not valid JSON: line 1, column 24"),
        ('{\n  "model_type": "llama",\n  "x": nope\n}', "is not valid JSON: line 3, column 9"),
        ('{"a": NaN}', "is not valid JSON"),
        ('{"a": 1} {"b": 2}', "is not valid JSON"),
        ('{"model_type": "llama"}\0{"x"', "is not valid JSON: line 1, column 24"),
        ('{"a": 1e999}', "too large for a double"),
        ('{"a": "\\ud800"}', "is not valid JSON"),
        ('{"a": 1, "a": 1}', "has the field 'a' twice"),
        ('{"x": {"a": 1, "a": 1}}', "has the field 'a' twice"),
        ('{"a": ' + "[" * 100_000, "is nested more than 32 deep"),
        ('{"a": ' * 100_000, "is nested more than 32 deep"),
        ('{"a": "' + "x" * 9_000_000 + '"}', "at most 8000000 are read"),
        ("version https://git-lfs.github.com/spec/v1\n", "is not valid JSON: line 1"),
    ],
    ids=lambda x: x[:20],
)
def test_text_that_is_no_config(text: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=r"^folder/config\.json: .*" + message):
        parse(text)


def test_bytes_that_are_not_utf8() -> None:
    with pytest.raises(ModelLoadError, match="is not valid JSON: line 1, column 8"):
        _core.parse_config(b'{"a": "\xff"}', "config.json")


def test_messages_stay_short() -> None:
    for changes in ({"model_type": "x" * 10**6}, {"hidden_act": "é\n" * 10**6}, {"hidden_size": "9" * 10**6}):
        with pytest.raises(ModelLoadError) as error:
            parse_llama(**changes)
        assert len(str(error.value)) < 400
        assert "\n" not in str(error.value)


def test_config_object() -> None:
    config = _core.parse_config(json.dumps(LLAMA))
    assert config.hidden_size == config["hidden_size"] == 64
    assert "hidden_size" in repr(config)
    with pytest.raises(KeyError, match="nope"):
        config["nope"]


# ---- transformers ----------------------------------------------------------------------------------------


def as_transformers_reads(config: dict[str, Any], transformers: Any) -> dict[str, Any]:
    """The same facts from the configuration class of transformers."""
    hf = transformers.AutoConfig.for_model(**config)
    window = getattr(hf, "sliding_window", None) or 0
    types = getattr(hf, "layer_types", None)
    if hf.model_type == "mistral":
        windows = [window] * hf.num_hidden_layers
    else:
        windows = [window if t == SLIDING else 0 for t in types or [FULL] * hf.num_hidden_layers]
    return {
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "vocab_size": hf.vocab_size,
        "max_position_embeddings": hf.max_position_embeddings,
        "tie_word_embeddings": hf.tie_word_embeddings,
        "sliding_window": windows,
        "rope": (hf.rope_parameters["rope_type"], hf.rope_parameters["rope_theta"]),
        "rms_norm_eps": pytest.approx(hf.rms_norm_eps, rel=1e-6),
    }


TRANSFORMERS_CASES: dict[str, dict[str, Any]] = {
    **{f"tiny {name}": tiny_models.config_of(name) for name in tiny_models.MODELS},
    # All optional fields absent: the defaults of each family.
    **{
        f"bare {t}": of_family(t, num_attention_heads=32, architectures=ABSENT)
        for t in ("llama", "mistral", "qwen2", "qwen3")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS_CASES)
def test_same_as_transformers(name: str, transformers: Any) -> None:
    config = TRANSFORMERS_CASES[name]
    parsed = parse(config)
    parsed["rope"] = (parsed["rope"]["type"], parsed["rope"]["theta"])
    expected = as_transformers_reads(config, transformers)
    assert {key: parsed[key] for key in expected} == expected
