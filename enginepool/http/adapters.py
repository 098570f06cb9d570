"""The LoRA adapter of a request: SGLang finds its name, in `model="BASE:ADAPTER"` or in `lora_path`. Pure: no SGLang here."""

from typing import Any

from enginepool.http.refusals import refused


def take_adapter(request: Any) -> dict[str, str]:
    """The adapter of SGLang's `GenerateReqInput`, as an argument of `Pool.generate`; nothing for the model alone. The request
    has none afterwards: SGLang would look for it among adapters that it has loaded in this process.

    Raises:
        BadRequest: there are several.
    """
    name: Any = getattr(request, "lora_path", None)
    if not name:
        return {}
    if not isinstance(name, str):
        raise refused("lora_path", "all prompts of a request have the same adapter; give one name")
    request.lora_path = None
    return {"adapter": name}
