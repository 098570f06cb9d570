"""What a caller gives `load_adapter` becomes the two files that PEFT writes."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import numpy as with_numpy
from safetensors import torch as with_torch

from enginepool import Pool
from enginepool.client.adapters import _config_text, _packed  # pyright: ignore[reportPrivateUsage]
from enginepool.errors import BadRequest


def test_tensors_of_torch_and_numpy_become_a_safetensors_file() -> None:
    given: dict[str, Any] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((1, 2), np.float16)}
    read: dict[str, Any] = with_numpy.load(_packed(given))
    assert all((read[name] == array).all() and read[name].dtype == array.dtype for name, array in given.items())
    tensors = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(3, 1, dtype=torch.bfloat16, requires_grad=True)}
    tensors["c"] = torch.tensor(1.0)
    back: dict[str, Any] = with_torch.load(_packed(tensors))
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert _packed(b"a file") == b"a file"


def test_a_configuration_of_peft_has_sets_and_becomes_json() -> None:
    assert json.loads(_config_text({"r": 2, "target_modules": {"v", "q"}})) == {"r": 2, "target_modules": ["q", "v"]}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"name": "../f", "path": "/a"}, "name"),
        ({"name": 3, "path": "/a"}, "name"),
        ({"name": "f"}, "tensors"),
        ({"name": "f", "path": "/a", "tensors": b"", "config": {}}, "tensors"),
        ({"name": "f", "tensors": b""}, "tensors"),
        ({"name": "f", "tensors": {}, "config": {}}, "tensors"),
        ({"name": "f", "tensors": {"a": np.ones(2)}, "config": {}}, "tensors"),
        ({"name": "f", "tensors": {"a": [1.0]}, "config": {}}, "tensors"),
        ({"name": "f", "tensors": b"", "config": "{}"}, "config"),
        ({"name": "f", "tensors": b"", "config": {"a": object()}}, "config"),
        ({"name": "f", "tensors": b"", "config": {"a": float("nan")}}, "config"),
        ({"name": "f", "path": "/a", "version": 0}, "version"),
        ({"name": "f", "path": ""}, "path"),
        ({"name": "f", "path": 3}, "path"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_it_is_sent(arguments: dict[str, Any], field: str) -> None:
    pool = Pool.__new__(Pool)
    with pytest.raises(BadRequest) as refused:
        asyncio.run(pool.load_adapter(**arguments))
    assert refused.value.field == field
