"""argv -> one frozen `Config`. The only place that parses flags and refuses contradictions.

`Config` holds the sections; `Config.flat` is what plug-ins get as `args`: every flag readable by its name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config import config_file
from vime.config.cluster import ClusterConfig, ModelConfig, OptimizerConfig, ParallelConfig
from vime.config.flags import Knob, add_section, flag_name, knobs, read_section
from vime.config.lora import LoraConfig
from vime.config.problems import Problems
from vime.config.rollout import AgentConfig, DataConfig, EngineConfig, EvalConfig, RewardConfig, RolloutConfig
from vime.config.run import AgreementConfig, DebugConfig, TrackingConfig
from vime.config.training import AlgoConfig, BatchConfig, CriticConfig, QueueConfig, WeightsConfig
from vime.config.translate import PASSTHROUGH, Reading, Word, read
from vime.types import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All sections of one run, frozen after parsing. A package receives the section it needs."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agents: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    agreement: AgreementConfig = field(default_factory=AgreementConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    vllm_flags: tuple[str, ...] = ()  # engine flags as vLLM spells them, from --vllm-*
    router_flags: tuple[str, ...] = ()  # router flags as vllm-router spells them, from --router-*
    derived: tuple[tuple[str, object], ...] = ()  # knobs that `resolve` filled in, with their values

    @property
    def flat(self) -> Args:
        return Args(self)

    def replace(self, **changes: object) -> Config:
        """Return a copy with knobs changed by flag name, for example `replace(run_dir="...")`."""
        sections: dict[str, dict[str, object]] = {}
        for name, value in changes.items():
            sections.setdefault(section_of(name), {})[name] = value
        return dataclasses.replace(
            self, **{key: dataclasses.replace(getattr(self, key), **values) for key, values in sections.items()}
        )

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Config:
        """Inverse of `to_dict`, also after JSON turned tuples into lists."""
        sections = {
            name: kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in record[name].items()})
            for name, kind in SECTIONS.items()
        }
        derived = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in record.get("derived", ()))
        vllm_flags, router_flags = tuple(record["vllm_flags"]), tuple(record["router_flags"])
        return cls(vllm_flags=vllm_flags, router_flags=router_flags, derived=derived, **sections)


SECTIONS: dict[str, type] = {
    spec.name: spec.default_factory  # type: ignore[misc]  # a class, which is more than a factory
    for spec in dataclasses.fields(Config)
    if spec.default_factory is not dataclasses.MISSING
}
_HOME = {spec.name: name for name, section in SECTIONS.items() for _, spec in knobs(section)}
_READABLE = _HOME | {
    name: section
    for section, kind in SECTIONS.items()
    for name, member in vars(kind).items()
    if isinstance(member, property)
}
"""What `Args` returns: the flags and what a section derives from several of them."""


if TYPE_CHECKING:

    class _Flags(  # type: ignore[misc]  # every flag with its type; nothing is ever made of it, so slots do not clash
        ClusterConfig,
        ParallelConfig,
        ModelConfig,
        LoraConfig,
        OptimizerConfig,
        DataConfig,
        RolloutConfig,
        AgentConfig,
        RewardConfig,
        EvalConfig,
        EngineConfig,
        AlgoConfig,
        CriticConfig,
        BatchConfig,
        QueueConfig,
        WeightsConfig,
        TrackingConfig,
        AgreementConfig,
        DebugConfig,
    ): ...
else:
    _Flags = object


class Args(_Flags):
    """The frozen configuration readable by flag name: `args.rollout_batch_size`. What plug-ins see."""

    __slots__ = ("config",)
    config: Config

    def __init__(self, config: Config) -> None:
        object.__setattr__(self, "config", config)

    if not TYPE_CHECKING:  # to the type checker the flags are attributes: an unknown name is an error

        def __getattr__(self, name: str) -> object:
            if name.startswith("__") or name == "config":
                raise AttributeError(name)
            if name not in _READABLE:
                raise AttributeError(f"args has no {name!r}; flags are listed in docs/flags.md")
            return getattr(getattr(self.config, _READABLE[name]), name)

        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(f"args is frozen: cannot set {name!r}. Return new values instead.")

    def __reduce__(self) -> tuple[type, tuple[Config]]:
        return (Args, (self.config,))


def section_of(knob: str) -> str:
    if knob not in _HOME:
        raise ConfigError(f"no flag is called {knob!r}; flags are listed in docs/flags.md")
    return _HOME[knob]


def build_parser(program: str = "train.py") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        allow_abbrev=False,
        description="Train a language model with reinforcement learning: megatron-core trains, vLLM generates.",
        epilog="Flags of the installed vLLM: --vllm-<flag>; of vllm-router: --router-<flag>.",
    )
    parser.add_argument(config_file.FLAG, metavar="FILE", help=config_file.HELP)
    for section in SECTIONS.values():
        add_section(parser, section)
    return parser


def parse(argv: Sequence[str], *, program: str = "train.py") -> Config:
    """Parse without cross checks. ConfigError names every flag that is unknown or has a bad value."""
    problems = Problems()
    config, _ = collect(argv, problems, program=program)
    problems.raise_all()
    return config


def parse_readable(argv: Sequence[str]) -> tuple[Config, set[str]]:
    """What could be read of a command line, and the flags that could not: those have their defaults."""
    config, reading = collect(argv, Problems(), program="")
    return config, reading.refused_flags


def collect(argv: Sequence[str], problems: Problems, *, program: str) -> tuple[Config, Reading]:
    """Return what could be read; a flag with a problem has its default, and the problem is added to `problems`."""
    files, own = config_file.split_config_files(argv)
    words, of_files = list[Word](), Problems()
    try:
        for path in files:
            words += _read_file(path, problems, of_files, program=program)
    except ConfigError as error:  # what the file would have given is not known: no other check makes sense
        problems.add(str(error))
        _read_words(own, problems, program=program)
        problems.raise_all()
    found = Problems()
    config, reading = _read_words([*words, *own], found, program=program)
    named = set(of_files)
    problems.add(*(problem for problem in found if problem not in named))
    return config, reading


def _read_words(words: Sequence[Word], problems: Problems, *, program: str) -> tuple[Config, Reading]:
    parser = build_parser(program)
    parser.error = _refuse  # type: ignore[method-assign,assignment]  # argparse would end the process
    reading = read(words, parser, problems)
    sections: dict[str, Any] = {}  # each of its own class
    for name, section in SECTIONS.items():
        sections[name] = read_section(section, reading.namespace, problems, reading.refused_flags)
    vllm_flags, router_flags = (tuple(reading.passthrough[prefix]) for prefix in PASSTHROUGH)
    return Config(vllm_flags=vllm_flags, router_flags=router_flags, **sections), reading


def _read_file(path: Path, problems: Problems, of_files: Problems, *, program: str) -> list[Word]:
    """Return the command line that --config names. Problems of it alone are added to `problems` with its name, and to
    `of_files` without."""
    words, own = config_file.read_config_file(path, SECTIONS), Problems()
    _read_words(words, own, program=program)
    of_files.add(*own)
    problems.add(*(f"{config_file.FLAG} {path}: {problem}" for problem in own))
    return words


def _refuse(message: str) -> None:
    raise ConfigError(f"{message.removeprefix('argument ').rstrip('.')}. See train.py --help.")


def iter_flags() -> Iterator[tuple[str, str, Knob]]:
    """(section title, flag, field) of every flag, in order: the source of docs/flags.md."""
    for section in SECTIONS.values():
        title = (section.__doc__ or section.__name__).strip().partition("\n")[0].rstrip(".")
        for _, spec in knobs(section):
            yield title, flag_name(spec), spec


def dump(config: Config) -> str:
    return json.dumps(config.to_dict(), indent=2)
