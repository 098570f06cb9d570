"""Configurations that transformers 5 wrote have the keys that SGLang reads."""

from types import SimpleNamespace

from enginepool.workers.sglang.host.process import complete_configurations


def test_a_key_that_transformers_no_longer_writes_has_its_one_value() -> None:
    class Config:
        pass

    class Older:
        position_embedding_type = "relative_key"

    library = SimpleNamespace(
        BertConfig=Config, RobertaConfig=type("R", (), {}), XLMRobertaConfig=Older, Gemma2Config=type("G", (), {})
    )
    complete_configurations(library)
    assert library.BertConfig().position_embedding_type == "absolute"
    assert library.XLMRobertaConfig().position_embedding_type == "relative_key", "what a configuration says stays"
    assert library.Gemma2Config().hidden_act == "gelu_pytorch_tanh"
    named = Config()
    named.position_embedding_type = "relative_key"  # type: ignore[attr-defined]
    assert named.position_embedding_type == "relative_key"  # type: ignore[attr-defined]
