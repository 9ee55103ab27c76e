"""``tiny-vllm info``: what was built, and what it can run on."""

from __future__ import annotations

from tiny_vllm import _core
from tiny_vllm.cli.app import command


@command(
    examples="""
    tiny-vllm info
    CUDA_VISIBLE_DEVICES=1 tiny-vllm info    # the devices that a run would see
    """
)
def info() -> None:
    """How this package was built, and which devices it sees."""
    print("Build")
    for name, value in _core.build_info().items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        print(f"  {name}: {' '.join(value) if isinstance(value, list) else value}")
    best, *others = _core.available_isas()
    print("Devices")
    print(f"  cpu: instruction sets {', '.join([f'{best} (default)', *others])}")
    gpus, why_none = _core.cuda_devices()
    if not gpus:
        print(f"  cuda: none ({why_none})")
    for gpu in gpus:
        capability = f"{gpu.compute_capability // 10}.{gpu.compute_capability % 10}"
        memory = f"{gpu.memory_bytes / 1e9:.1f} GB"
        print(f"  cuda:{gpu.index}: {gpu.name}, compute capability {capability}, {memory}")
