"""Labels that are named by their texts: each is one token of the model. No SGLang here."""

from collections.abc import Sequence
from typing import Any

from enginepool.protocol.errors import WireError

#: tokens of a wrong label that an error shows
_SHOWN = 8


def label_ids(tokenizer: Any, labels: Sequence[str]) -> list[int]:
    """The token that each label is, without special tokens around it.

    Raises:
        WireError: a label is no token of the model, or several.
    """
    if not labels:
        return []
    rows: list[list[int]] = tokenizer(list(labels), add_special_tokens=False, verbose=False)["input_ids"]
    for i, (label, ids) in enumerate(zip(labels, rows, strict=True)):
        if len(ids) == 1 and (ids[0] != getattr(tokenizer, "unk_token_id", None) or label == tokenizer.unk_token):
            continue
        if len(ids) == 1:
            what = "is not in the vocabulary of this model"
        else:
            shown = ", ".join(f"{token} {tokenizer.decode([token])!r}" for token in ids[:_SHOWN])
            what = f"is {len(ids)} tokens of this model ({shown}{', …' if len(ids) > _SHOWN else ''})"
        at = f"label_texts[{i}]"
        raise WireError("bad_request", f"{at}: {label!r} {what}; a label is one token", field=at, limit="1")
    return [ids[0] for ids in rows]
