"""What a node of a cluster has to have in common with the driver."""

from __future__ import annotations

from vime.config.parse import Config
from vime.ray.nodes import PACKAGES, Look, _differences

MINE = dict.fromkeys(PACKAGES, "1.0")


def test_transformer_engine_is_asked_for_on_every_node_where_the_run_uses_its_layers() -> None:
    node, here = Look("10.0.0.2", MINE, []), {**MINE, "transformer_engine": "2.20.2"}
    assert _differences(node, here, Config()) == [], "layers of Vime need none"
    config = Config().replace(transformer_impl="transformer_engine")
    assert _differences(node, here, config) == ["transformer_engine is missing (this process has 2.20.2)"]
    assert _differences(Look("10.0.0.2", here, []), here, config) == []
