"""Writes protocol/vectors/vectors.json, one vector a paragraph: `python -m tests.wire.make_vectors`.

The committed file is the contract; this script is how its bytes were made, without the codec that it is there to check.
"""

import json
from pathlib import Path

from tests.wire.golden_generate import GENERATING
from tests.wire.golden_invalid import INVALID
from tests.wire.golden_valid import CAUSAL, CLASSIFIER, CROSS_ENCODER, EMBEDDING, VALID

PATH = Path(__file__).parents[2] / "protocol" / "vectors" / "vectors.json"


def document() -> str:
    """The text of vectors.json."""
    entries = [vector.entry() for vector in (*VALID, *INVALID)]
    body = ",\n".join(
        " {" + ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items()) + "}"
        for entry in entries
    )
    models = {
        "causal": CAUSAL,
        "classifier": CLASSIFIER,
        "cross-encoder": CROSS_ENCODER,
        "embedding": EMBEDDING,
        "generating": GENERATING,
    }
    return f'{{"specification": 1,\n"models": {json.dumps(models)},\n"vectors": [\n{body}\n]}}\n'


if __name__ == "__main__":
    PATH.write_text(document(), encoding="utf-8")
