"""What SGLang's caches keep across new weights, also while requests are in the engine. No SGLang here.

An empty engine is flushed. So is one whose requests were retracted: none of them has KV. Requests that were paused in place
keep their KV, and SGLang's cache keeps what they share. So the cache is cut in two by its key instead: requests that have no
KV yet, and all later ones, get another `extra_key` than those that run.

A flush leaves what the encoder made of images, videos and audio, which SGLang keeps by their content alone.
"""

from types import SimpleNamespace
from typing import Any

from enginepool.workers.sglang.patches.scheduler import flush_caches, noted_scheduler

#: how often weights came while requests kept their KV, in this process
_kept_times = [0]
#: what encoders made of media, in this process
_media_caches: list[Any] = []
#: what SGLang's answer to a ticket says where the scheduler went on with it
WENT_ON = "new weights, and the scheduler goes on"
#: whether it did, with the ticket at hand
_went_on = [False]


def note_media_cache(cache: Any) -> None:
    """Keep the caches of media that this process makes, for `forget_old_weights`. `cache` is SGLang's class."""
    init = cache.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _media_caches.append(self)

    cache.__init__ = initialize


def separate_prefixes(scheduler: Any) -> None:
    """Have each request take prefixes from the cache only where they are of weights that it may use. `scheduler` is SGLang's
    class."""
    add = scheduler._add_request_to_queue

    def add_request_to_queue(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(request, "key_without_weights"):
            _set_key(request)
        return add(self, request, *args, **kwargs)

    scheduler._add_request_to_queue = add_request_to_queue


def _set_key(request: Any) -> None:
    """Its key is that of the weights of now. A request in the queue has no KV."""
    if not hasattr(request, "key_without_weights"):
        request.key_without_weights = request.extra_key
    if _kept_times[0]:
        request.extra_key = f"{request.key_without_weights or ''}|weights {_kept_times[0]}"


def tell_that_it_went_on(model_updater: Any) -> None:
    """Have the answer to a ticket say that the scheduler went on: what it sends after that was computed on the new weights.
    `model_updater` is SGLang's class that calls loaders."""
    update = model_updater.update_weights_from_tensor

    def update_weights_from_tensor(self: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        _went_on[0] = False
        success, message = update(self, named_tensors, load_format=load_format)
        return success, WENT_ON if _went_on[0] else message

    model_updater.update_weights_from_tensor = update_weights_from_tensor


def go_on() -> None:
    """Have the paused scheduler compute again, before the worker asks for it."""
    noted_scheduler().continue_generation(SimpleNamespace(torch_empty_cache=False))
    _went_on[0] = True


def ready_for_new_weights(running: str) -> bool:
    """Flush what may be flushed. False: the scheduler has work in hand, or is not paused as it should be."""
    if not running:
        return flush_caches()
    scheduler = noted_scheduler()
    return bool(scheduler._engine_paused) and (running == "in_place" or _flush_behind_the_queue(scheduler))


def forget_old_weights(running: str) -> bool:
    """New weights are there: what was computed on the old ones serves no later request. False: it may."""
    for media_cache in _media_caches:
        media_cache.clear()
    if not running:
        return flush_caches()
    scheduler = noted_scheduler()
    if running != "in_place":
        return _flush_behind_the_queue(scheduler)
    _kept_times[0] += 1
    for request in scheduler.waiting_queue:
        _set_key(request)
    return True


def _flush_behind_the_queue(scheduler: Any) -> bool:
    """Flush while requests wait, none of which has KV. Older versions of SGLang refuse that."""
    grammars = scheduler.grammar_manager
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    preparing, grammars.grammar_queue = grammars.grammar_queue, []
    try:
        return flush_caches()
    finally:
        scheduler.waiting_queue, grammars.grammar_queue = waiting, preparing
