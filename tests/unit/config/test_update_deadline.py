"""The deadline of a weight update grows with the model."""

import pytest

from vime.config.parse import Config
from vime.config.update_deadline import update_deadline_s


@pytest.mark.parametrize(
    ("sizes", "more_s"),
    [
        ([], 0),
        ([499_999_999], 0),  # below a GB in fp32
        ([500_000_000], 1),
        ([4_000_000_000, 4_000_000_000], 16),  # 4B in bf16: 16 GB in fp32
    ],
)
def test_an_update_has_a_second_more_for_each_gigabyte_in_fp32(tmp_path, sizes, more_s):
    for number, size in enumerate(sizes):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)  # takes no space
    config = Config().replace(hf_checkpoint=str(tmp_path), update_weight_timeout_secs=100.0)
    assert update_deadline_s(config) == 100 + more_s
