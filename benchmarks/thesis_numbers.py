"""What the thesis measured (chapter 4), and the models that are run again: numbers only.

The thesis' machines: three Jetson TX2 boards over gigabit Ethernet, float32 (TinyLlama: float16), on their GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """One model of chapter 4.

    Attributes:
        system: "nanogpt", "gpt2" (no caches, one sample per frame) or "llama" (today's ring).
        n_tokens: per sample in the full run here; `quick_tokens` in the quick one, 0 leaves the model out.
        cuts: blocks per node, by number of nodes: tables II, III, V, VI, VIII and IX.
        rates: tokens/s of the thesis, by number of nodes; None where it did not fit (sections 4.1 to 4.3).
        memory_gb: RAM and VRAM per node, by number of nodes: tables IV, VII and X.
        is_trained: on a text, before; others have random weights.
        is_half: TinyLlama's 16 bits, of weights and caches; others are computed in float32.
    """

    key: str
    title: str
    system: str
    n_tokens: int
    quick_tokens: int
    cuts: dict[int, tuple[int, ...]]
    rates: dict[int, float | None]
    memory_gb: dict[int, tuple[float, ...] | None]
    is_trained: bool = False
    is_half: bool = False

    @property
    def numbers(self) -> dict[str, str]:
        """The options of a run."""
        return {"quantize": "fp16", "kv_dtype": "fp16"} if self.is_half else {"dtype": "float32"}

    def n_samples(self, n_nodes: int) -> int:
        """As in the thesis: two on one or two nodes, three on three; of Llamas three in any case."""
        return 3 if self.system == "llama" else max(2, n_nodes)


MODELS = (
    Model("nanogpt-7", "NanoGPT, 7 blocks", "nanogpt", 1000, 24,
          {1: (7,), 2: (3, 4), 3: (1, 3, 3)}, {1: 16.0, 2: 20.9, 3: 22.3},
          {1: (0.991,), 2: (0.981, 0.874), 3: (0.974, 0.865, 0.866)}, is_trained=True),
    Model("nanogpt-9", "NanoGPT, 9 blocks", "nanogpt", 1000, 0,
          {1: (9,), 2: (4, 5), 3: (2, 4, 3)}, {1: 14.4, 2: 18.7, 3: 20.7},
          {1: (1.07,), 2: (1.04, 0.899), 3: (1.01, 0.874, 0.875)}),
    Model("nanogpt-12", "NanoGPT, 12 blocks", "nanogpt", 1000, 0,
          {1: (12,), 2: (5, 7), 3: (3, 5, 4)}, {1: 10.7, 2: 15.8, 3: 17.9},
          {1: (1.17,), 2: (1.13, 0.934), 3: (1.105, 0.899, 0.891)}),
    Model("gpt2", "GPT-2", "gpt2", 400, 10,
          {1: (12,), 2: (5, 7), 3: (2, 5, 5)}, {1: 7.91, 2: 8.43, 3: 13.3},
          {1: (1.65,), 2: (1.43, 1.14), 3: (1.25, 1.04, 1.04)}),
    Model("gpt2-medium", "GPT-2 Medium", "gpt2", 400, 0,
          {1: (24,), 2: (10, 14), 3: (4, 10, 10)}, {1: 2.63, 2: 4.09, 3: 7.67},
          {1: (2.9,), 2: (2.26, 1.87), 3: (1.65, 1.57, 1.57)}),
    Model("gpt2-large", "GPT-2 Large", "gpt2", 400, 0,
          {1: (36,), 2: (16, 20), 3: (10, 13, 13)}, {1: 1.12, 2: 2.07, 3: 4.03},
          {1: (5.6,), 2: (3.87, 3.17), 3: (3.06, 2.37, 2.37)}),
    Model("gpt2-xl", "GPT-2 XL", "gpt2", 400, 0,
          {1: (48,), 2: (22, 26), 3: (14, 17, 17)}, {1: None, 2: None, 3: 2.15},
          {1: None, 2: None, 3: (4.85, 3.87, 3.87)}),
    Model("nano-llama", "NanoLlama 304M", "llama", 800, 10,
          {1: (12,), 2: (5, 7), 3: (2, 5, 5)}, {1: 17.87, 2: 25.97, 3: 30.46},
          {1: (2.6,), 2: (1.76, 1.76), 3: (1.34, 1.46, 1.46)}),
    Model("tiny-llama", "TinyLlama 1.1B", "llama", 800, 0,
          {1: (22,), 2: (10, 12), 3: (6, 8, 8)}, {1: 9.23, 2: 13.33, 3: 18.0},
          {1: (3.41,), 2: (2.6, 2.6), 3: (1.98, 1.99, 1.99)}, is_half=True),
)  # fmt: skip
BY_KEY = {model.key: model for model in MODELS}
