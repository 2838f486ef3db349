"""The names that plug-ins written for slime import, provided by Vime: all aliases are in this file.

`install` makes `slime.utils.types` and the other names of `_modules` importable, before a slime that may be installed:
its `Sample` is another class. `dialect_faults` reports, before anything is imported, what a plug-in uses that Vime does
not have, with the line. Requests in SGLang's format (`post`) go to Vime's engines.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from vime.config.parse import Args
from vime.protocols import SamplingParams, import_object
from vime.rollout import rm_text
from vime.rollout.abort_scope import is_aborting
from vime.rollout.engine_client import EngineClient
from vime.rollout.exchanges import Completion, Record, current_record
from vime.rollout.filter_hub import check_reward_nonzero_std
from vime.rollout.generation import engine_client, generate, train_sampling_params
from vime.rollout.prompts import context_limit, load_tokenizer
from vime.types import (
    DynamicFilterOutput,
    Reward,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
)
from vime.utils.http import HttpFailure, HttpSession

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Function = TypeVar("Function")
PACKAGE = "slime"
RENAMED_ARGS = {
    "sglang_router_ip": "vllm_router_ip",
    "sglang_router_port": "vllm_router_port",
    "sglang_router_policy": "vllm_router_policy",
    "sglang_server_concurrency": "vllm_server_concurrency",
}
"""Flags that plug-ins read under slime's names."""
TO_VLLM = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos")},
    **{name: name for name in ("repetition_penalty", "frequency_penalty", "presence_penalty", "seed")},
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Sampling parameters of SGLang and their names in vLLM."""
OF_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
"""Those that only change the text of a completion."""
POST_ATTEMPTS, POST_TIMEOUT_S = 5, 300.0
UNSUPPORTED_WORDS = {
    "keep_when_insufficient": "a group that the filter rejects is never kept: remove keep_when_insufficient.",
}


def install() -> None:
    """Make the aliases importable; called before a plug-in is loaded, any number of times."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of `_modules`; any other name below `slime` does not exist."""

    def find_spec(
        self,
        fullname: str,
        path: object = None,  # noqa: ARG002 - its protocol
        target: object = None,  # noqa: ARG002 - its protocol
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        if fullname not in _modules():
            raise ModuleNotFoundError(
                f"{fullname} is not among the modules of slime that Vime provides ({', '.join(sorted(_modules()))})",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:  # noqa: ARG002 - its protocol
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_modules()[module.__name__])


class GenerateState:
    """The object from which slime's generate functions take tokenizer and limits; one lives as long as the call."""

    def __init__(self, args: Args) -> None:
        self.args, self.processor, self.aborted = args, None, False
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.semaphore = asyncio.Semaphore(args.vllm_server_concurrency * (args.rollout_num_engines or 1))
        self.sampling_params = sglang_params(train_sampling_params(args))


class CallArgs:
    """The frozen configuration, with attributes that a plug-in sets for itself; they live as long as one call."""

    def __init__(self, args: Args) -> None:
        self.__dict__["_args"] = args

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "_args":
            raise AttributeError(name)
        return getattr(self._args, RENAMED_ARGS.get(name, name))


def sglang_params(params: Mapping[str, object]) -> dict[str, object]:
    """Return Vime's sampling parameters under SGLang's names, as slime passes them to a generate function."""
    named = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in params.items()}
    of_text = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    return {"top_k": -1, "stop": None, "stop_token_ids": None, **named, **of_text}


async def post(
    url: str,
    payload: dict[str, object],
    max_retries: int = POST_ATTEMPTS,
    headers: Mapping[str, str] | None = None,
) -> object:
    """Ask Vime's engines when `url` is the router's /generate, else the server at `url`; the response is read as JSON.

    A request that cannot be sent is a plain error, so that the message contains the plug-in's line."""
    record = current_record()
    if record is not None and url.rstrip("/") == _model_url(record.args):
        return await _ask_engines(record, payload)
    trouble, content = "", json.dumps(payload).encode()
    session = HttpSession(headers=headers, is_outside=True)
    try:
        for attempt in range(max(1, min(max_retries, POST_ATTEMPTS))):
            await asyncio.sleep(0.5 * attempt)
            try:
                response = await session.call("POST", url, content, deadline_s=POST_TIMEOUT_S)
            except HttpFailure as error:
                trouble = str(error)
            else:
                if response.status < 400:
                    return json.loads(response.content)
                trouble = response.described()
    finally:
        await session.close()
    raise RuntimeError(f"post to {url}: no response, the last error: {trouble}. Is the service up?")


async def _ask_engines(record: Record, payload: Mapping[str, object]) -> dict[str, object]:
    """Return one completion in SGLang's format. Requests that a weight update aborted are sent again."""
    args, session = record.args, record.sample.session_id
    tokenizer = load_tokenizer(args.hf_checkpoint)
    prompt = _prompt_ids(tokenizer, payload, record.sample)
    given = payload.get("sampling_params")
    asked: dict[str, object] = dict(given) if isinstance(given, Mapping) else {}
    params = _vllm_params(asked)
    params["max_tokens"] = min(params["max_tokens"], context_limit(args) - len(prompt))
    completion = Completion(token_ids=(), log_probs=(), versions=(), finish_reason="length")
    if params["max_tokens"] > 0:
        completion = await _completed(engine_client(args), prompt, params, session)
    text = tokenizer.decode(
        list(completion.token_ids), skip_special_tokens=bool(asked.get("skip_special_tokens", True))
    )
    said = [[logp, token, None] for logp, token in zip(completion.log_probs, completion.token_ids, strict=True)]
    meta = {
        "finish_reason": {"type": completion.finish_reason},
        "output_token_logprobs": said,
        "prompt_tokens": len(prompt),
        "completion_tokens": len(said),
        "cached_tokens": 0,
        "weight_version": str(completion.versions[-1].version) if completion.versions else "0",
    }
    return {"text": str(text), "output_ids": list(completion.token_ids), "meta_info": meta}


async def _completed(client: EngineClient, prompt: list[int], params: SamplingParams, session_id: str) -> Completion:
    while True:
        completion: Completion
        (completion,) = await client.generate(prompt, params, session_id=session_id)
        if completion.finish_reason != "abort" or is_aborting():
            return completion


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, payload: Mapping[str, object], sample: Sample) -> list[int]:
    """Return `input_ids` as they are. For `text` return the sample's own tokens when they decode to it: encoding it
    again may give other tokens, and the completion would follow tokens that the sample does not have."""
    ids = payload.get("input_ids")
    if ids is not None:
        return [int(each) for each in cast("Iterable[int]", ids.tolist() if hasattr(ids, "tolist") else ids)]
    text = payload.get("text")
    if not isinstance(text, str):
        raise ValueError(f"a request without input_ids or text: it has {', '.join(sorted(payload))}.")
    if sample.tokens and tokenizer.decode(sample.tokens) == text:
        return list(sample.tokens)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _vllm_params(asked: Mapping[str, object]) -> SamplingParams:
    unknown = sorted(name for name in asked if name not in TO_VLLM and name not in OF_TEXT)
    if unknown:
        raise ValueError(
            f"a request with the sampling parameters {', '.join(unknown)}, which Vime does not send to its engines. "
            f"Expected some of {', '.join(sorted(TO_VLLM))}."
        )
    if "max_new_tokens" not in asked and "max_tokens" not in asked:
        raise ValueError("a request without max_new_tokens among its sampling_params. Add it.")
    params = {TO_VLLM[name]: value for name, value in asked.items() if name in TO_VLLM and value is not None}
    top_k = params.get("top_k")
    if isinstance(top_k, int | float) and top_k < 1:
        del params["top_k"]
    return cast("SamplingParams", {"temperature": 1.0, **params})  # the engine reports what is wrong with a value


class Scorers(NamedTuple):
    """The functions with which the run scores one sample, and several."""

    one: Callable[[Args, Sample], Awaitable[Reward]]
    several: Callable[[Args, list[Sample]], Awaitable[list[Reward]]]


_scorers: list[Scorers] = []  # at most one


def set_scorers(scorers: Scorers) -> None:
    """Set the functions. `rm_hub` calls it when it is imported: it imports plug-ins itself, and plug-ins import this
    file, so this file cannot import `rm_hub`."""
    _scorers[:] = [scorers]


async def _async_rm(args: Args, sample: Sample, **_: object) -> Reward:
    return await _scorers[0].one(args, sample)


async def _batched_async_rm(args: Args, samples: list[Sample], **_: object) -> list[Reward]:
    return await _scorers[0].several(args, samples) if samples else []


async def _generate(args: Args, sample: Sample, sampling_params: Mapping[str, object]) -> Sample:
    return await generate(args, sample, _vllm_params(sampling_params))


def _load_function(path: str) -> object:
    return import_object(path, "load_function")


def _f1(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    return rm_text.token_f1(prediction, ground_truth)


def _gpqa(response: str, label: object, metadata: Mapping[str, object] | None = None) -> float:
    return rm_text.choice_score(response, label, metadata)


class _SingletonMeta(type):
    """Makes one object of each class in a process."""

    _made: dict[type, object] = {}  # noqa: RUF012 - shared on purpose

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if cls not in _SingletonMeta._made:
            _SingletonMeta._made[cls] = super().__call__(*args, **kwargs)
        return _SingletonMeta._made[cls]


@contextlib.contextmanager
def _trace_span(*_: object, **__: object) -> Iterator[None]:
    yield


def _trace_function(*_: object, **__: object) -> Callable[[Function], Function]:
    return lambda function: function


def _model_url(args: Args, _name: str = "", endpoint: str = "/generate") -> str:
    return f"http://{args.vllm_router_ip}:{args.vllm_router_port}{endpoint}"


@lru_cache(maxsize=1)
def _modules() -> dict[str, dict[str, object]]:
    """Return module -> its names."""
    filter_types: dict[str, object] = {"DynamicFilterOutput": DynamicFilterOutput}
    return {
        PACKAGE: {},
        "slime.utils": {},
        "slime.utils.types": {"Sample": Sample},
        "slime.utils.http_utils": {"post": post},
        "slime.utils.misc": {"load_function": _load_function, "SingletonMeta": _SingletonMeta},
        "slime.utils.processing_utils": {"load_tokenizer": lambda path, *_, **__: load_tokenizer(str(path))},
        "slime.observability": {},
        "slime.observability.trace_utils": {
            "trace_span": _trace_span,
            "trace_function": _trace_function,
            "build_sglang_meta_trace_attrs": lambda *_, **__: {},
        },
        "slime.rollout": {},
        "slime.rollout.base_types": {
            "RolloutFnTrainOutput": RolloutFnTrainOutput,
            "RolloutFnEvalOutput": RolloutFnEvalOutput,
        },
        "slime.rollout.filter_hub": filter_types,
        "slime.rollout.filter_hub.base_types": filter_types,
        "slime.rollout.filter_hub.dynamic_sampling_filters": {
            "check_reward_nonzero_std": lambda args, samples, **_: check_reward_nonzero_std(args, samples)
        },
        "slime.rollout.rm_hub": {"async_rm": _async_rm, "batched_async_rm": _batched_async_rm},
        "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": rm_text.dapo_score},
        "slime.rollout.rm_hub.math_utils": {"extract_answer": rm_text.boxed},
        "slime.rollout.rm_hub.f1": {"f1_score": _f1},
        "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": _gpqa},
        "slime.rollout.sglang_rollout": {
            "GenerateState": GenerateState,
            "generate": _generate,
            "get_model_url": _model_url,
        },
    }


@lru_cache(maxsize=64)
def speaks_slime(file: str) -> bool:
    """Return whether the source of a plug-in imports anything of slime."""
    names = [name for node in ast.walk(_parse(Path(file))) for name in _imported(node)]
    return any(name.split(".")[0] == PACKAGE for name in names)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""] if node.level == 0 else []
    return [entry.name for entry in node.names] if isinstance(node, ast.Import) else []


def dialect_faults(file: Path) -> list[str]:
    """Return what this source uses of slime that Vime does not have: `file.py:12: ... instead`, one line each."""
    tree = _parse(file)
    faults: list[str] = []
    if not speaks_slime(str(file)):
        return faults
    for line, module, name in _imports(tree):
        known = _modules()
        if module not in known or (name and name not in known[module] and f"{module}.{name}" not in known):
            what = f"{module}.{name}" if name else module
            faults.append(f"{file}:{line}: {what} is not among the names of slime that Vime provides.")
    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword | ast.Attribute):
            continue
        word, line = node.arg if isinstance(node, ast.keyword) else node.attr, node.value.lineno
        if word in UNSUPPORTED_WORDS:
            faults.append(f"{file}:{line}: {UNSUPPORTED_WORDS[word]}")
    return faults


def _parse(file: Path) -> ast.Module:
    """Parse the file; an empty module for what is no Python: importing it then reports why."""
    try:
        return ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) of everything that is imported from slime when the file is; no name for `import
    slime.x`. Imports in a `try` that catches their failure, or for type checkers only, may be missing."""
    optional = {id(node) for block in ast.walk(tree) if _may_fail(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        is_optional = id(node) in optional
        if isinstance(node, ast.Import):
            for entry in node.names:
                if entry.name.split(".")[0] == PACKAGE and not is_optional:
                    yield node.lineno, entry.name, ""
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == PACKAGE:
            for entry in node.names:
                if not is_optional:
                    yield node.lineno, str(node.module), entry.name


def _may_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.Try) and any("ImportError" in ast.unparse(handler) for handler in node.handlers)
