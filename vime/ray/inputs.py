"""Check everything that a run is given before any process starts: models by their headers, tokenizers, records,
plug-ins.

`Refusals` gathers what every check finds, so that one start names all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import ParamSpec

from vime.backends.megatron_utils.architecture import as_critic, read_architecture
from vime.backends.megatron_utils.hf_tensors import EMBEDDING, HEAD, VALUE_HEAD, expected_tensors
from vime.config.hf_config import read_model_shape
from vime.config.model_files import TensorHeader, check_dtypes, check_tensors, check_tokenizer, read_headers
from vime.config.parse import Config
from vime.config.problems import Problems, single_problems
from vime.rollout.data_check import data_faults
from vime.training.roles import engine_spec, needed_roles
from vime.types import ConfigError, DataError, EngineSpec, Role, VimeError

P = ParamSpec("P")


class Refusals:
    """What is wrong so far, in the order in which it was found."""

    def __init__(self) -> None:
        self._errors: list[VimeError] = []

    def attempt(self, check: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> None:
        """Call a check and keep its refusal. Other errors after a refusal are ignored, because they follow from it."""
        try:
            check(*arguments, **options)
        except VimeError as error:
            self._errors.append(error)
        except OSError as error:
            self._errors.append(
                ConfigError(f"{error}. Expected something that can be read; check path and permissions.")
            )
        except Exception:  # boundary: a check may rely on what an earlier one refused
            if not self._errors:
                raise

    def add_of(self, others: Refusals, *, not_about: Collection[str]) -> None:
        """Add what `others` found, except refusals that name one of these flags: they may follow from a value that was
        not read."""
        self._errors += [ConfigError(problem) for problem in others._problems().not_about(not_about)]

    def raise_all(self) -> None:
        """Raise a single refusal as it is; several as one, numbered."""
        if len(self._errors) == 1:
            raise self._errors[0]
        self._problems().raise_all()

    def _problems(self) -> Problems:
        problems = Problems()
        for error in self._errors:
            problems.add(*(single_problems(error) if isinstance(error, ConfigError) else [str(error)]))
        return problems


def check_inputs(config: Config, refusals: Refusals) -> None:
    """Check all files and records. Needs no derived default, so it also runs when flags contradict each other."""
    if config.model.hf_checkpoint:
        for spec in _models(config):
            refusals.attempt(_check_weights, config, spec)
        refusals.attempt(_check_tokenizer, config)
    refusals.attempt(_check_data, config)


def _models(config: Config) -> Iterator[EngineSpec]:
    """Check each directory of weights once."""
    seen = set()
    roles = (Role.ACTOR,) if config.debug.debug_rollout_only else needed_roles(config)
    for role in roles:
        spec = engine_spec(role, config, total_steps=0)
        key = (spec.checkpoint, spec.has_value_head)
        if key not in seen:
            seen.add(key)
            yield spec


def _check_weights(config: Config, spec: EngineSpec) -> None:
    """Check that the files are whole and hold what config.json says. For a family that megatron does not know, only
    sizes of the vocabulary are compared, because only transformers knows the tensors' names."""
    where = f"{spec.flag} {spec.checkpoint}"
    found = read_headers(spec.checkpoint, flag=spec.flag)
    if not found:
        return  # reported where the flags are checked
    vocab_size = read_model_shape(
        spec.checkpoint, flag=spec.flag
    ).vocab_size  # a config.json without it belongs to no model
    try:
        architecture = read_architecture(spec.checkpoint, flag=spec.flag)
    except ConfigError:  # the check of the architecture reports it if the chosen backend cannot train it
        matrices = {name: each for name, each in found.items() if name.endswith(".weight") and len(each.shape) > 1}
        check_dtypes(matrices, where=where)  # masks and positions are numbers of other kinds
        _check_rows(found, vocab_size, where)
        return
    if config.cluster.train_backend == "fsdp" and not any(name in found for name in (EMBEDDING, "model.norm.weight")):
        return  # saved without the prefix of the language model, which transformers finds by itself
    if spec.has_value_head:
        architecture = as_critic(architecture)
    check_tensors(
        found,
        expected_tensors(architecture),
        where=where,
        may_miss={VALUE_HEAD} if spec.has_value_head else (),
        may_have={HEAD} if spec.has_value_head or architecture.is_tied else (),
    )


def _check_rows(found: dict[str, TensorHeader], vocab_size: int, where: str) -> None:
    for name, header in found.items():
        is_embedding = name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))
        if is_embedding and vocab_size and header.shape[0] != vocab_size:
            raise ConfigError(
                f"{where}: the weights do not belong to its config.json: {name} has {header.shape[0]} rows, vocab_size "
                f"is {vocab_size}. Take config.json and *.safetensors of one model."
            )


def _check_tokenizer(config: Config) -> None:
    directory = config.model.hf_checkpoint
    vocab_size = read_model_shape(directory).vocab_size
    check_tokenizer(directory, vocab_size=vocab_size)
    beyond = [
        number for number in config.rollout.rollout_stop_token_ids if not 0 <= number < (vocab_size or number + 1)
    ]
    if beyond:
        raise ConfigError(
            f"--rollout-stop-token-ids {' '.join(map(str, beyond))}: the model has the ids 0 to {vocab_size - 1}. No "
            "completion would ever end there; change the flag."
        )


def _check_data(config: Config) -> None:
    problems = Problems()
    problems.add(*data_faults(config.flat))
    try:
        problems.raise_all()
    except ConfigError as error:
        faults = single_problems(error)
        raise error if len(faults) > 1 else DataError(faults[0]) from None
