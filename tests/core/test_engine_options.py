"""Options that an engine does not have are found without the engine, by their names."""

from typing import Any

import pytest

from enginepool.workers import options
from enginepool.workers.options import judge


@pytest.mark.parametrize(
    ("engine", "given", "key", "said"),
    [
        ("sim", {"seed": 1, "vocap": 3}, "vocap", "the engine sim has no such option; did you mean 'vocab'?"),
        ("sim", {"zzz": 3}, "zzz", "the engine sim has no such option"),
        ("sim", {"vocab": 0}, "", "vocab = 0: must be more than 0"),
        ("sim", {"vocab": "many"}, "", "vocab = 'many': must be a whole number"),
        ("sim", {"tensors": 3}, "", "tensors = 3: must be a list"),
        ("sglang", {"device": "cpu"}, "device", "not set here: it comes from device of the group"),
        ("sglang", {"tp_sise": 2}, "tp_sise", "the engine sglang installed here has no such option; did you mean 'tp_size'?"),
    ],
)
def test_what_an_engine_would_refuse_is_named(
    monkeypatch: pytest.MonkeyPatch, engine: str, given: dict[str, Any], key: str, said: str
) -> None:
    monkeypatch.setattr(options, "sglang_settings", lambda: {"model_path", "tp_size", "page_size"})
    found, why = judge(engine, given)
    assert found == key
    assert why.endswith(said)


@pytest.mark.parametrize(("engine", "given"), [("sim", {"vocab": 300}), ("sim", {}), ("sglang", {"tp_size": 2})])
def test_what_an_engine_has_is_let_through(monkeypatch: pytest.MonkeyPatch, engine: str, given: dict[str, Any]) -> None:
    monkeypatch.setattr(options, "sglang_settings", lambda: {"model_path", "tp_size"})
    assert judge(engine, given) == ("", "")


def test_an_engine_whose_settings_cannot_be_read_is_left_to_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        """There is no such package."""

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    assert options.sglang_settings() == set()
    assert judge("sglang", {"anything": 1}) == ("", "")
