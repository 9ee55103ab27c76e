"""Computes tiny_golden.json: what transformers makes of the models of tests/tiny_models.py.

    python tests/data/make_tiny_golden.py OUT.json [NAME...]  # needs the extra `hf`

Weights as stored, computed in float32 with eager attention, end tokens ignored.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tiny_models

NUM_NEW_TOKENS = 16


def load(folder: Path, dtype: torch.dtype = torch.float32, changes: dict[str, Any] | None = None) -> Any:
    """A new model each time: dynamic rope keeps state."""
    config = AutoConfig.for_model(**{**json.loads((folder / "config.json").read_text()), **(changes or {})})
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


@torch.no_grad()
def last_logits(model: Any, ids: list[int]) -> Any:
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()


@torch.no_grad()
def greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """Tokens, and by how much each beat the second best."""
    tokens: list[int] = []
    margins: list[float] = []
    cache, step_input = None, ids
    for _ in range(NUM_NEW_TOKENS):
        out = model(torch.tensor([step_input]), past_key_values=cache, use_cache=True)
        best = out.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        cache, step_input = out.past_key_values, tokens[-1:]
    return tokens, margins


def without_feature(name: str, folder: Path) -> Any:
    """The model with the feature under test switched off, or None."""
    model = tiny_models.MODELS[name]
    if model.without is None and model.without_tensors is None:
        return None
    off = load(folder, changes=model.without)
    for part, value in (model.without_tensors or {}).items():
        hits = [p for n, p in off.named_parameters() if part in n]
        assert hits, part
        for parameter in hits:
            parameter.data.fill_(value)
    return off


def golden_of(name: str, folder: Path) -> dict[str, Any]:
    """`*_max_abs_diff` say how far the last logits of a prompt move: with the feature left out (control), in
    float64, in bfloat16. `greedy_ids_without_cache` is there where it differs from `greedy_ids`."""
    sha256 = tiny_models.write_model(name, folder)
    noise = bf16 = 0.0
    prompts = []
    for n in tiny_models.MODELS[name].prompt_lengths:
        ids = np.random.RandomState(1000 + n).randint(0, 256, size=n, dtype=np.int64).tolist()
        logits = last_logits(load(folder), ids)
        noise = max(noise, float((last_logits(load(folder, torch.float64), ids) - logits).abs().max()))
        bf16 = max(bf16, float((last_logits(load(folder, torch.bfloat16), ids) - logits).abs().max()))
        tokens, margins = greedy(load(folder), ids)
        assert tokens[0] == int(logits.argmax())
        prompt: dict[str, Any] = {
            "n": n,
            "ids": ids,
            "last_logits": [float(f"{v:.6g}") for v in logits.tolist()],
            "greedy_ids": tokens,
            "margins": margins,
        }
        off = without_feature(name, folder)
        if off is not None:
            moved = float((last_logits(off, ids) - logits).abs().max())
            prompt["control_max_abs_diff"] = float(f"{moved:.4g}")
        whole = ids + tokens
        uncached = [int(last_logits(load(folder), whole[: n + i]).argmax()) for i in range(NUM_NEW_TOKENS)]
        if uncached != tokens:
            prompt["greedy_ids_without_cache"] = uncached
        prompts.append(prompt)
    return {
        "what": tiny_models.MODELS[name].what,
        "weights_sha256": sha256,
        "prompts": prompts,
        "logits_std": round(float(np.std(prompts[-1]["last_logits"])), 3),
        "f32_vs_f64_max_abs_diff": float(f"{noise:.3g}"),
        "bf16_compute_max_abs_diff": float(f"{bf16:.3g}"),
    }


def main() -> None:
    transformers.logging.set_verbosity_error()
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[2:] or tiny_models.MODELS:
            models[name] = golden_of(name, Path(folder) / name)
            print(f"{name:26} std {models[name]['logits_std']}", flush=True)
    oracle = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "compute": "float32, eager attention, eos ignored",
    }
    text = json.dumps({"oracle": oracle, "models": models}, separators=(",", ":"))
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
