"""What --buffer-filter-path names in slime: takes groups out of the buffer, in place, for the next round."""

from slime.utils.types import Sample


def pop_newest(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Newest first, and of what is left everything older than the last two is forgotten."""
    taken = [buffer.pop() for _ in range(min(num_samples, len(buffer)))]
    del buffer[:-2]
    return taken


def twice(args, rollout_id, buffer, num_samples):
    return [buffer[0], buffer[0]]


def made_up(args, rollout_id, buffer, num_samples):
    return [[Sample(group_index=0, index=0)]]


def too_many(args, rollout_id, buffer, num_samples):
    return list(buffer)


def leaves_them(args, rollout_id, buffer, num_samples):
    """Answers groups and forgets to take them out."""
    return buffer[:num_samples]


def adds(args, rollout_id, buffer, num_samples):
    buffer.append([Sample(group_index=0, index=0)])
    return []
