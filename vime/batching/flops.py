"""How many floating-point operations a row costs, from the model's shape: to balance ranks and to compute MFU.

A product of [a, b] and [b, c] takes 2 a b c floating-point operations. With h hidden size, H query heads and G heads of
keys and values, of dimension d, f MLP columns and V vocabulary, one token of one layer takes

    query, key, value    2 h (H + 2 G) d
    output projection    2 H d h
    SwiGLU MLP           3 products: 6 h f       with experts: the router 2 h E, and top_k experts of 6 h f_e

and token t of a sequence (from 1), which sees t keys, 2 H d t for the scores and as much for the weighted values: over
n tokens 4 H d (1 + ... + n) = 2 H d n (n + 1), the part that grows with the square of the length; in a layer with a
window of w no token sees more than w keys. Latent attention (DeepSeek) has matrices of its own, which are counted one
by one; its d is the mean of the widths of a key and a value. The logits of a token take 2 h V; the trainer computes
those of response tokens only. Backward takes two products for each of forward's (towards the input and towards the
weight): three times forward in all. Norms, rotary positions,
softmax, embedding lookups and the optimizer are left out: they are memory traffic, not arithmetic.
(Kaplan et al. 2020, section 2.1, counts alike, there without causal masking and the vocabulary.)
"""

from __future__ import annotations

from dataclasses import dataclass

from vime.config.hf_config import ModelShape

TRAIN_PASSES = 3  # forward, and a backward of twice its work

PEAK_BF16_TFLOPS = {
    "B200": 2250, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148,
    "A100": 312, "A800": 312, "A10": 125, "A40": 150, "A6000": 155, "L40S": 362, "L40": 181, "L4": 121, "RTX 4090": 165,
}  # fmt: skip
"""Dense bf16 peak of a device by a part of its name, TFLOP/s, from the vendor's data sheets (without sparsity)."""


def layer_flops(shape: ModelShape, length: int) -> int:
    """Return the FLOPs of a forward pass through every layer, for one sequence of `length` tokens."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    plain, experts = 6 * hidden * shape.intermediate_size, 0
    num_dense = shape.num_layers
    if shape.num_experts:
        num_dense = shape.num_dense_layers
        columns = shape.num_experts_per_token * shape.moe_intermediate_size + shape.shared_expert_size
        experts = 2 * hidden * shape.num_experts + 6 * hidden * columns
    attention = 2 * (shape.attention_weights or hidden * (queries + 2 * keys) + queries * hidden)
    per_token = shape.num_layers * attention + num_dense * plain + (shape.num_layers - num_dense) * experts
    return length * per_token + _attention_flops(shape, length)


def _attention_flops(shape: ModelShape, length: int) -> int:
    """Return the FLOPs of the scores and weighted values of every layer."""
    queries, num_windows = shape.num_attention_heads * shape.head_dim, len(shape.window_layers)
    within = min(length, shape.window)
    keys_in_window = within * (within + 1) // 2 + (length - within) * within
    keys = (shape.num_layers - num_windows) * length * (length + 1) // 2 + num_windows * keys_in_window
    return 4 * queries * keys


def forward_flops(shape: ModelShape, total_length: int, response_length: int) -> int:
    """Return the FLOPs of one forward pass over a row."""
    return layer_flops(shape, total_length) + 2 * shape.hidden_size * shape.vocab_size * response_length


def train_flops(shape: ModelShape, total_length: int, response_length: int) -> int:
    """Return the FLOPs of forward and backward over a row, without recomputation: those that MFU counts (model FLOPs
    utilisation, Chowdhery et al. 2022, appendix B)."""
    return TRAIN_PASSES * forward_flops(shape, total_length, response_length)


def executed_flops(shape: ModelShape, total_length: int, response_length: int, *, recompute: str | None) -> int:
    """Return `train_flops` plus what --recompute-granularity computes twice: those that HFU counts. `full`: every
    layer; `selective`: the scores and weighted values of attention."""
    again = 0
    if recompute == "full":
        again = layer_flops(shape, total_length)
    elif recompute == "selective":
        again = _attention_flops(shape, total_length)
    return train_flops(shape, total_length, response_length) + again


def peak_tflops(device_name: str, *, bf16: bool) -> float | None:
    """Return the peak of one device, TFLOP/s; None for a CPU, an unknown device, or fp32 (whose peak depends on torch's
    TF32 switches). The longest matching name is used: an "H100 NVL" is not an "H100"."""
    fitting = [name for name in PEAK_BF16_TFLOPS if name.lower() in device_name.lower()]
    if not bf16 or not fitting:
        return None
    return float(PEAK_BF16_TFLOPS[max(fitting, key=len)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundWork:
    """What the trainer ranks compute in one round, all together."""

    num_tokens: int  # of prompts and responses, each counted once
    model_flops: int  # without recomputation
    executed_flops: int  # with what is recomputed in the backward pass

    def rates(self, seconds: float, *, num_ranks: int, device_name: str, bf16: bool) -> dict[str, float]:
        """Return the metrics perf/* of a round whose training took `seconds`: tokens a second of all ranks; executed
        TFLOP/s of one rank; and, where the device's peak is known, the shares of it that model and executed FLOPs
        reach."""
        per_rank = max(seconds, 1e-9) * num_ranks * 1e12
        metrics = {
            "perf/train_tokens_per_sec": self.num_tokens / max(seconds, 1e-9),
            "perf/train_tflops": self.executed_flops / per_rank,
        }
        peak = peak_tflops(device_name, bf16=bf16)
        if peak is not None:
            metrics["perf/mfu"] = self.model_flops / per_rank / peak
            metrics["perf/hfu"] = self.executed_flops / per_rank / peak
        return metrics
