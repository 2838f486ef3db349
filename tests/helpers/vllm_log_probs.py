"""What vLLM says of given tokens, for several models in one process: starting it costs more than loading them.

    python -m tests.helpers.vllm_log_probs MODELS.json TOKENS.json ANSWERS.json [DTYPE]

reads a list of model directories and a list of token lists; writes, by model and token list, the log-probability of
each token but the first, given those before it. DTYPE: float32 unless given.
"""

import json
import sys
from pathlib import Path

from vime.backends.vllm_utils.launch import LATENT_BACKEND_CPU, LATENT_OPS_CPU
from vime.config.hf_config import has_latent_attention

LATENT_ON_CPU = {"attention_backend": LATENT_BACKEND_CPU, "compilation_config": LATENT_OPS_CPU}


def main(models: Path, tokens: Path, answers: Path, dtype: str = "float32") -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    on_cpu = not torch.cuda.is_available()
    prompts = json.loads(tokens.read_text())
    found = []
    for directory in json.loads(models.read_text()):
        engine = LLM(
            directory,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=1 << 24,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            gpu_memory_utilization=0.1,  # several beside each other on one GPU; the CPU's cache has a size of its own
            **(LATENT_ON_CPU if on_cpu and has_latent_attention(directory) else {}),
        )
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        found.append(
            [
                [
                    entry[token].logprob
                    for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
                ]
                for output in outputs
            ]
        )
        del engine
        cleanup_dist_env_and_memory()
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:])
