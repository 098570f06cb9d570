"""Changes to SGLang's scheduler so that a pause is between two steps. No SGLang here: its classes are arguments."""

from typing import Any


class _Processed:
    """In place of the result of a forward that was processed when the scheduler paused."""

    #: as that of a result: nothing is awaited
    copy_done = None


_PROCESSED = _Processed()


def answer_in_order(channels: Any) -> None:
    """Have new tokens and answers to requests leave through one socket, so that an answer tells that all tokens before it have
    arrived. `channels` is SGLang's class of a scheduler's sockets.

    With `answer_at_once` both go to the same place. SGLang has a socket for each, and ZeroMQ keeps no order between two.
    """
    create = channels.create

    def create_one(*args: Any, **kwargs: Any) -> Any:
        made = create(*args, **kwargs)
        object.__setattr__(made, "send_to_detokenizer", made.send_to_tokenizer)
        return made

    channels.create = create_one


def finish_the_step_before_a_pause(scheduler: Any) -> None:
    """Have a pause process the forward that was launched last, so that its tokens leave before anything else is answered.
    `scheduler` is SGLang's class.

    SGLang's pause `in_place` leaves them until it goes on. A weight update in between would have tokens of the old weights
    leave after it. Its loop takes a result from its queue for each forward: it finds this one again, as processed.
    """
    pause, process = scheduler.pause_generation, scheduler.process_batch_result

    def pause_generation(self: Any, request: Any) -> Any:
        if request.mode == "in_place" and self.enable_overlap and self.last_batch:
            batch, result = self.result_queue.popleft()
            self.process_batch_result(batch, result)
            self.result_queue.append((batch, _PROCESSED))
        return pause(self, request)

    def process_batch_result(self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        return None if result is _PROCESSED else process(self, batch, result, *args, **kwargs)

    scheduler.pause_generation = pause_generation
    scheduler.process_batch_result = process_batch_result


def drop_what_is_prepared_in_a_pause(scheduler: Any) -> None:
    """Have a paused scheduler drop a request at once whose grammar is being compiled. `scheduler` is SGLang's class.

    SGLang only marks it: it leaves with a forward, after the pause. One that waits for its forward leaves at once.
    """
    abort = scheduler.abort_request

    def abort_request(self: Any, request: Any) -> Any:
        if self._engine_paused:
            grammars, kept = self.grammar_manager, list[Any]()
            for one in grammars.grammar_queue:
                if request.abort_all or one.rid.startswith(request.rid):
                    if one.grammar is not None:  # else SGLang has marked it
                        one.grammar.cancel()
                    self.waiting_queue.append(one)
                else:
                    kept.append(one)
            grammars.grammar_queue = kept
        return abort(self, request)

    scheduler.abort_request = abort_request
