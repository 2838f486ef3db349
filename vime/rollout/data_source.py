"""Where training prompts come from: a file or reasoning-gym, in an order that a checkpoint can continue.

`RolloutDataSource` goes through the prompts epoch by epoch. `RolloutDataSourceWithBuffer` adds a buffer of groups that
were drawn and not used; they are returned first and are part of the saved state, so that no prompt is lost.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import random
from collections.abc import Callable
from typing import Any

from vime.config.parse import Args
from vime.protocols import calling_plugin
from vime.rollout.images import mark_image_fault
from vime.rollout.plugins import plugin, plugin_args
from vime.rollout.prompts import Prompt, Prompts, check_lengths, read_prompts
from vime.rollout.reasoning_gym_tasks import make_prompts
from vime.types import DataError, PluginError, Sample

logger = logging.getLogger(__name__)


class RolloutDataSource:
    """Groups of `n_samples_per_prompt` pending samples, one prompt after the other, epoch after epoch.

    `group_index` and `index` only grow, also over epochs and restarts, so each identifies one group or sample of the
    whole run. The order of epoch e depends only on --rollout-seed and e.
    """

    def __init__(self, args: Args) -> None:
        self._args = args
        self._prompts = _load_prompts(args)
        self._fingerprint = _fingerprint(self._prompts)
        self._epoch = 0
        self._position = 0
        self._next_group_index = 0
        self._next_index = 0
        self._orders: dict[int, list[int]] = {}  # of the last two epochs

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        return [self._draw() for _ in range(num_groups)]

    def group_at(self, group_index: int) -> list[Sample]:
        """Return group number `group_index` of the whole run, as `get_samples` returns it, whatever was drawn
        before."""
        epoch, position = divmod(group_index, len(self._prompts))
        prompt, size = self._prompts[self._order(epoch)[position]], self._args.n_samples_per_prompt
        return self._group(prompt, group_index, group_index * size)

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Take back groups that were not used."""
        if groups:
            raise DataError(
                f"{type(self).__name__} cannot take back {len(groups)} groups. Use RolloutDataSourceWithBuffer "
                "(--data-source-path)."
            )

    def save(self, rollout_id: int) -> dict[str, object]:
        """Return the state from which `load` continues; JSON-ready."""
        return {
            "rollout_id": rollout_id,
            "epoch": self._epoch,
            "position": self._position,
            "next_group_index": self._next_group_index,
            "next_index": self._next_index,
            "fingerprint": self._fingerprint,
        }

    def recognise(self, state: dict[str, Any]) -> None:
        """Raise DataError when `state` is of other prompts: before the engines, which take longer, are waited for."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"the prompts differ from those of the checkpoint (round {state['rollout_id']}): fingerprint "
                f"{self._fingerprint}, expected {state['fingerprint']}. Resume with the same prompts, labels, "
                "metadata and tokenizer."
            )

    def load(self, state: dict[str, Any]) -> None:
        self.recognise(state)
        self._epoch, self._position = state["epoch"], state["position"]
        self._next_group_index, self._next_index = state["next_group_index"], state["next_index"]

    @property
    def epoch(self) -> int:
        """Full passes over the prompts so far."""
        return self._epoch

    @property
    def num_too_long(self) -> int:
        """Prompts that were left out because they are too long."""
        return self._prompts.num_too_long

    def __len__(self) -> int:
        return len(self._prompts)

    def _draw(self) -> list[Sample]:
        if self._position == len(self._prompts):
            self._epoch, self._position = self._epoch + 1, 0
        prompt = self._prompts[self._order(self._epoch)[self._position]]
        size = self._args.n_samples_per_prompt
        group = self._group(prompt, self._next_group_index, self._next_index)
        self._position += 1
        self._next_group_index += 1
        self._next_index += size
        return group

    def _group(self, prompt: Prompt, group_index: int, first: int) -> list[Sample]:
        """Return the group of a prompt, with the content of its images. One whose image has changed is marked, and will
        be dropped with that reason; in --reference-mode, which promises the same bits, DataError ends the run."""
        images, fault = None, ""
        try:
            images = None if prompt.images is None else prompt.images.inputs()
        except DataError as error:
            if self._args.reference_mode:
                raise
            logger.warning("group %d is left out: %s", group_index, error)
            fault = str(error)
        numbers = range(first, first + self._args.n_samples_per_prompt)
        group = [new_sample(prompt, images, group_index=group_index, index=index) for index in numbers]
        if fault:
            mark_image_fault(group, fault)
        return group

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self._prompts)))
            if self._args.rollout_shuffle:
                random.Random(f"{self._args.rollout_seed}:{epoch}").shuffle(order)
            self._orders = {known: self._orders[known] for known in self._orders if known == epoch - 1} | {epoch: order}
        return self._orders[epoch]


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The default data source: unused groups come first, lowest group index first, or those that --buffer-filter-path
    chooses."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._buffer: list[list[Sample]] = []
        self._dropped: list[list[Sample]] = []
        self._filter = plugin(args, "buffer_filter_path")

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        if self._filter is not None and self._buffer and num_groups:
            waiting = self._chosen(self._filter, num_groups)
        else:
            waiting, self._buffer = self._buffer[:num_groups], self._buffer[num_groups:]
        return waiting + super().get_samples(num_groups - len(waiting))

    def take_dropped(self) -> list[list[Sample]]:
        """Return groups that the filter neither returned nor left in the buffer since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self._buffer = sorted([*self._buffer, *groups], key=lambda group: group[0].group_index)

    def save(self, rollout_id: int) -> dict[str, object]:
        buffer = [[sample.to_dict() for sample in group] for group in self._buffer]
        return {**super().save(rollout_id), "buffer": buffer}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._buffer = [[Sample.from_dict(record) for record in group] for group in state["buffer"]]

    @property
    def buffer_length(self) -> int:
        """Groups waiting in the buffer."""
        return len(self._buffer)

    def _chosen(self, choose: Callable[..., object], num_groups: int) -> list[list[Sample]]:
        """Return what the filter takes out of the buffer, which it may change in place as slime's filters do. A group
        that it returns leaves the buffer in any case, or it would be trained twice."""
        where, known = f"--buffer-filter-path {self._args.buffer_filter_path}", {id(group) for group in self._buffer}
        before = list(self._buffer)
        with calling_plugin(where, choose):
            taken = choose(plugin_args(choose, self._args), None, self._buffer, num_groups)
        if not isinstance(taken, list) or len(taken) > num_groups:
            got = f"{len(taken)} groups" if isinstance(taken, list) else f"{type(taken).__name__}"
            raise PluginError(f"{where}: returned {got}, expected a list of at most {num_groups}. Return fewer.")
        if any(id(group) not in known for group in taken):
            raise PluginError(f"{where}: returned a group that is not in the buffer. Return only those, unchanged.")
        if any(id(group) not in known for group in self._buffer):
            raise PluginError(f"{where}: put a group into the buffer. Only take groups out of it.")
        is_taken, is_left = {id(group) for group in taken}, {id(group) for group in self._buffer}
        if len(is_taken) < len(taken):
            numbers = [group[0].group_index for group in taken]
            twice = next(number for number in numbers if numbers.count(number) > 1)
            raise PluginError(f"{where}: returned group {twice} twice. Return each once.")
        self._buffer = [group for group in before if id(group) in is_left - is_taken]
        self._dropped += [group for group in before if id(group) not in is_left | is_taken]
        return taken


def new_sample(prompt: Prompt, images: dict[str, object] | None, *, group_index: int, index: int) -> Sample:
    """Return a pending sample. `images`: what `prompt.images` was read to, once for the group."""
    return Sample(
        group_index=group_index,
        index=index,
        session_id=f"group-{group_index}",
        prompt=prompt.text,
        tokens=list(prompt.token_ids),
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(dict(prompt.metadata)),
        multimodal_inputs=None if images is None else dict(images),
    )


def _load_prompts(args: Args) -> Prompts:
    if args.reasoning_gym:
        return check_lengths(args, make_prompts(args))
    if not args.prompt_data:
        raise DataError("no prompts: give --prompt-data FILE or --reasoning-gym TASKS.")
    return read_prompts(args, args.prompt_data, flag="--prompt-data")


def _fingerprint(prompts: list[Prompt]) -> str:
    """Return a hash of tokens, labels and metadata in order: it tells whether a cursor still points at the same data,
    and whether its completions are still scored against the same labels."""
    digest = hashlib.sha256()
    for prompt in prompts:
        images = () if prompt.images is None else (prompt.images.digests,)  # text alone keeps its fingerprint
        record = (prompt.token_ids, prompt.label, dict(prompt.metadata), *images)
        # parquet brings values that JSON does not know, such as dates and bytes
        digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()[:16]
